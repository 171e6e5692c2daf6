// AMX tiles for machines without them, for tests: the few instructions that kernels use, as Intel's manual has them. What would
// be an invalid instruction there (tiles without a configuration, shapes that do not fit) stops the program here.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace canter::emulated {

struct TileConfig {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t column_bytes[16];
    std::uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

struct TileState {
    TileConfig config;
    std::uint8_t data[8][16][64];
};

inline thread_local TileState tile_state{};

inline void require(bool condition) {
    if (!condition) std::abort();
}

inline int tile_rows(int t) {
    require(tile_state.config.palette == 1);
    return tile_state.config.rows[t];
}
inline int tile_bytes(int t) {
    require(tile_state.config.palette == 1);
    return tile_state.config.column_bytes[t];
}

inline void load_config(const void* p) {
    tile_state = {};
    std::memcpy(&tile_state.config, p, sizeof(TileConfig));
    for (int t = 0; t < 8; ++t) require(tile_rows(t) <= 16 && tile_bytes(t) <= 64);
}

inline void release_tiles() { tile_state = {}; }

inline void zero_tile(int t) {
    require(tile_rows(t) > 0);
    std::memset(tile_state.data[t], 0, sizeof tile_state.data[t]);
}

inline void load_tile(int t, const void* base, long stride) {
    zero_tile(t);
    for (int r = 0; r < tile_rows(t); ++r) {
        std::memcpy(tile_state.data[t][r], static_cast<const char*>(base) + r * stride, static_cast<std::size_t>(tile_bytes(t)));
    }
}

inline void store_tile(int t, void* base, long stride) {
    require(tile_rows(t) > 0);
    for (int r = 0; r < tile_rows(t); ++r) {
        std::memcpy(static_cast<char*>(base) + r * stride, tile_state.data[t][r], static_cast<std::size_t>(tile_bytes(t)));
    }
}

// TDPBSUD: signed bytes of a, by rows, times unsigned bytes of b, four of a column to a lane.
inline void dot_tiles(int sum, int a, int b) {
    require(tile_rows(sum) == tile_rows(a) && tile_bytes(sum) == tile_bytes(b) && tile_bytes(a) == 4 * tile_rows(b) && tile_rows(b) > 0);
    for (int r = 0; r < tile_rows(sum); ++r) {
        for (int c = 0; c < tile_bytes(sum) / 4; ++c) {
            std::uint32_t total;
            std::memcpy(&total, &tile_state.data[sum][r][4 * c], sizeof total);
            for (int k = 0; k < tile_bytes(a); ++k) {
                const int x = static_cast<std::int8_t>(tile_state.data[a][r][k]), w = tile_state.data[b][k / 4][4 * c + k % 4];
                total += static_cast<std::uint32_t>(x * w);
            }
            std::memcpy(&tile_state.data[sum][r][4 * c], &total, sizeof total);
        }
    }
}

}  // namespace canter::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(p) (canter::emulated::load_config(p))
#define _tile_release() (canter::emulated::release_tiles())
#define _tile_zero(t) (canter::emulated::zero_tile(t))
#define _tile_loadd(t, base, stride) (canter::emulated::load_tile(t, base, stride))
#define _tile_stored(t, base, stride) (canter::emulated::store_tile(t, base, stride))
#define _tile_dpbsud(sum, a, b) (canter::emulated::dot_tiles(sum, a, b))
