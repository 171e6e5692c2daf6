// Sixteen rows at a time with AMX. Included by quant_kernel.h, inside its namespace.
//
// A tile of codes is what a run unpacked is anyway, [k / 4][output][k % 4], and the codes of sixteen quantised rows are a tile as
// they lie. Their dots are the integers that the other kernels find, and the float operations are the same, so a row's bits are
// those of one row alone. Every run has a scale of its own, so nothing more can be summed inside a tile; the sums go through memory,
// a run ahead of the floats made of them.

inline constexpr std::int64_t kBlockRows = 16;

// Numbers of tiles must be constants. Sums 0 and 1, rows 2 and 3, codes 4 and 5, for one run and the next; rows and codes of half
// a run 6 and 7.
struct TileShapes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t column_bytes[16] = {64, 64, 32, 32, 64, 64, 16, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 8, 8, 16, 4};
};
static_assert(sizeof(TileShapes) == 64);

// The compiler does not know that tiles are loaded from what was stored just before.
inline void settle(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Tiles configured for as long as this lives: left so, they would cost every switch of threads, and keep the core awake.
struct TilesInUse {
    TilesInUse() {
        alignas(64) const TileShapes shapes;
        settle(&shapes);
        _tile_loadconfig(&shapes);
    }
    ~TilesInUse() { _tile_release(); }
    TilesInUse(const TilesInUse&) = delete;
};

// The dots of one run: the first of its two halves, the second, or all of it.
enum class Part { all, first, second };

template <bool Odd, Part P>
inline void add_dots(const std::int8_t* x, std::int64_t x_stride, const std::uint8_t* codes) {
    if constexpr (P == Part::all && Odd) {
        _tile_loadd(3, x, x_stride);
        _tile_loadd(5, codes, 64);
        _tile_dpbsud(1, 3, 5);
    } else if constexpr (P == Part::all) {
        _tile_loadd(2, x, x_stride);
        _tile_loadd(4, codes, 64);
        _tile_dpbsud(0, 2, 4);
    } else {
        _tile_loadd(6, x + (P == Part::second ? 16 : 0), x_stride);
        _tile_loadd(7, codes + (P == Part::second ? 256 : 0), 64);
        if constexpr (P == Part::second) _tile_dpbsud(1, 6, 7);
        else _tile_dpbsud(0, 6, 7);
    }
}

// Sums of run i: to dots[0], or of its halves to dots[0] and dots[1].
template <class T, bool Odd>
inline void find_dots(const std::uint8_t* unpacked, const RowRun* x, std::int64_t stride, std::int64_t i, std::int32_t (*dots)[256]) {
    if constexpr (T::split) {
        _tile_zero(0);
        _tile_zero(1);
        add_dots<Odd, Part::first>(x[i].codes, stride, unpacked + i * T::unpacked_bytes);
        add_dots<Odd, Part::second>(x[i].codes, stride, unpacked + i * T::unpacked_bytes);
        _tile_stored(0, dots[0], 64);
        _tile_stored(1, dots[1], 64);
    } else {
        if constexpr (Odd) _tile_zero(1);
        else _tile_zero(0);
        add_dots<Odd, Part::all>(x[i].codes, stride, unpacked + i * T::unpacked_bytes);
        if constexpr (Odd) _tile_stored(1, dots[0], 64);
        else _tile_stored(0, dots[0], 64);
    }
}

template <class T, int H>
inline __attribute__((always_inline)) void add_floats(const Unpacked<T>& source, const RowRun* x, std::int64_t pitch,
                                                      const std::int32_t* dots, Floats (&totals)[kBlockRows]) {
    Floats scale, minimum;
    Ints zeros;
    if constexpr (!T::per_output) scale = source.template scale<H>();
    if constexpr (T::minima) minimum = source.minimum();
    if constexpr (T::by_group) zeros = source.zeros();
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) {
        const RowRun& row = x[r * pitch];
        const Ints offset = start<T, H>(row), dot = Ops::load_ints(reinterpret_cast<const std::uint8_t*>(dots + 16 * r));
        Ints total = {_mm512_add_epi32(offset.v, dot.v)};
        if constexpr (T::by_group) total = Ops::less_product(total, zeros, sum_of<T, H>(row));
        const Floats scale_x = Ops::spread(scale_of<T, H>(row));
        if constexpr (T::per_output) totals[r] = Ops::fma(Ops::to_floats(total), scale_x, totals[r]);
        else totals[r] = Ops::fma(Ops::to_floats(total), Ops::mul(scale, scale_x), totals[r]);
        if constexpr (T::minima) totals[r] = Ops::fma(minimum, Ops::spread(&row.scaled_sum), totals[r]);
    }
}

// Sixteen rows times an unpacked panel over `runs` runs. Sums of the first `skip` rows are left as they are.
template <class T>
inline void block_rows(const std::uint8_t* unpacked, const RowRun* x, std::int64_t pitch, std::int64_t runs, float* out,
                       std::int64_t out_stride, bool first, std::int64_t skip) {
    alignas(64) std::int32_t dots[2][T::split ? 2 : 1][256];
    const auto stride = static_cast<std::int64_t>(sizeof(RowRun)) * pitch;
    Floats totals[kBlockRows];
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) totals[r] = first ? Ops::zero_floats() : Ops::load_floats(out + r * out_stride);
    const auto floats = [&](std::int64_t i, const std::int32_t (*found)[256]) __attribute__((always_inline)) {
        Unpacked<T> source(unpacked + i * T::unpacked_bytes);
        source.next();
        add_floats<T, 0>(source, x + i, pitch, found[0], totals);
        if constexpr (T::split) add_floats<T, 1>(source, x + i, pitch, found[1], totals);
    };
    find_dots<T, false>(unpacked, x, stride, 0, dots[0]);
    for (std::int64_t i = 0; i < runs; i += 2) {
        if (i + 1 < runs) find_dots<T, true>(unpacked, x, stride, i + 1, dots[1]);
        floats(i, dots[0]);
        if (i + 1 >= runs) break;
        if (i + 2 < runs) find_dots<T, false>(unpacked, x, stride, i + 2, dots[0]);
        floats(i + 1, dots[1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) {
        if (r >= skip) Ops::store_floats(out + r * out_stride, totals[r]);
    }
}

// Rows of a tile in blocks; the last of them may begin among rows that are done. Gives how many rows are done: all, or none.
template <class T, int P>
inline std::int64_t all_blocks(const std::uint8_t* unpacked, const RowRun* x, std::int64_t pitch, std::int64_t rows, std::int64_t runs,
                               float* out, std::int64_t out_stride, bool first) {
    if (rows < kBlockRows) return 0;
    settle(unpacked);
    for (int p = 0; p < P; ++p) {
        for (std::int64_t r = 0; r < rows; r += kBlockRows) {
            const std::int64_t begin = r + kBlockRows <= rows ? r : rows - kBlockRows;
            block_rows<T>(unpacked + p * kChunkRuns * T::unpacked_bytes, x + begin * pitch, pitch, runs, out + begin * out_stride + 16 * p,
                          out_stride, first, r - begin);
        }
    }
    return rows;
}
