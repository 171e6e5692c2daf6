#define CANTER_ISA amx

#include "bench/limits_avx512_kernel.h"

namespace canter::amx {

constexpr int kTiles = 4;  // independent sums

struct TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};

inline void dot_tiles(std::int64_t rounds) {
    alignas(64) const TileShapes shapes;
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (std::int64_t round = 0; round < rounds; ++round) {
        _tile_dpbsud(0, 4, 5);
        _tile_dpbsud(1, 4, 5);
        _tile_dpbsud(2, 4, 5);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_release();
}

}  // namespace canter::amx

namespace canter {

const LimitKernels kAmxLimits = {amx::read_streams, amx::fma_f32, amx::dot_bf16, amx::dot_tiles, amx::kSums * 16 * 2, amx::kSums * 32 * 2,
                                 amx::kTiles * 16 * 16 * 64 * 2};

}  // namespace canter
