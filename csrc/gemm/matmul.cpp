#include "gemm/matmul.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gemm/float_table.h"
#include "gemm/quant/quant.h"
#include "parallel/thread_pool.h"

namespace canter {
namespace {

#if defined(CANTER_X86)
constexpr const FloatKernels* kTables[kNumIsas] = {&kScalarFloatKernels, &kAvx2FloatKernels, &kAvx512FloatKernels, nullptr,
                                                   &kAvx512Bf16FloatKernels};
#elif defined(CANTER_ARM)
constexpr const FloatKernels* kTables[kNumIsas] = {&kScalarFloatKernels, nullptr, nullptr, nullptr, nullptr, nullptr, &kNeonFloatKernels};
#else
constexpr const FloatKernels* kTables[kNumIsas] = {&kScalarFloatKernels};
#endif

// Below so many products a region costs more than it saves.
constexpr std::int64_t kSmall = 1 << 16;

// Elements of x worth handing to another thread, when rows are converted.
constexpr std::int64_t kConvertShare = 1 << 15;

// Rows of a tile: what kernels read of them in one chunk fits into the second cache beside the sums. A multiple of every
// kernel's rows.
constexpr std::int64_t kTileRows = 120;
constexpr std::int64_t kTilePanels = 16;

// Converted rows that are worked on at a time: they stay in the third cache while the weights pass by.
constexpr std::int64_t kRowsBytes = 8 << 20;

// The forms in which rows are wanted.
enum Form : int { floats, pairs, runs, halves, num_forms };

Form form_of(const Weights& w, bool use_pairs) {
    switch (row_family(w.format)) {
        case RowFamily::runs: return Form::runs;
        case RowFamily::halves: return Form::halves;
        default: return use_pairs && w.format == Format::bf16 ? Form::pairs : Form::floats;
    }
}

std::int64_t aligned(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// One block of rows of a call, and how it is cut.
struct Job {
    const MatmulCall call;
    const FloatKernels& kernels;
    std::int64_t row_begin, rows;
    bool few;
    RowsView views[num_forms] = {};  // float forms: as kernels read them; quantised ones: data alone
    std::int64_t row_tiles = 1, tile_rows = rows;
};

const char* x_row(const MatmulCall& call, std::int64_t row) {
    return static_cast<const char*>(call.x) + row * call.x_stride * dtype_bytes(call.x_type);
}

// Bytes that the rows of a form take once converted; none where x is used as it lies.
std::int64_t form_bytes(const Job& job, int form) {
    const MatmulCall& c = job.call;
    if (form >= Form::runs) return aligned(job.rows * quantized_row_bytes(c.width));
    const DType type = form == Form::pairs ? DType::bfloat16 : DType::float32;
    if (job.few) return c.x_type == type ? 0 : aligned(job.rows * c.width * dtype_bytes(type));
    return aligned(job.rows * ((c.width + kChunk - 1) / kChunk) * kChunk * dtype_bytes(type));
}

void convert_rows(Job& job, int form, void* place) {
    const MatmulCall& c = job.call;
    const char* x = x_row(c, job.row_begin);
    const auto shared = [&](const auto& body) {
        const std::int64_t each = std::max<std::int64_t>(1, kConvertShare / c.width), shares = (job.rows + each - 1) / each;
        if (shares == 1) return body(std::int64_t{0}, job.rows);
        parallel_for(shares, [&](std::int64_t i) { body(i * each, std::min((i + 1) * each, job.rows)); });
    };
    if (form >= Form::runs) {
        const QuantizeCall call{x, c.x_type, c.x_stride, c.width, form == Form::halves ? RowFamily::halves : RowFamily::runs, place};
        job.views[form] = {place, 0, 0, 0};
        return shared([&](std::int64_t begin, std::int64_t end) { quantize_rows(call, begin, end); });
    }
    const DType type = form == Form::pairs ? DType::bfloat16 : DType::float32;
    if (job.few && c.x_type == type) {
        job.views[form] = {x, c.x_stride, c.width, 0};
        return;
    }
    RowsView& view = job.views[form];
    view = job.few ? RowsView{place, c.width, c.width, 0} : RowsView{place, kChunk, kChunk, job.rows * kChunk};
    const PackRowsCall call{x, c.x_type, c.x_stride, c.width, place, type, view.row_stride, view.chunk, view.chunk_stride};
    shared([&](std::int64_t begin, std::int64_t end) { job.kernels.pack_rows(call, begin, end); });
}

// Panels [begin, end) of a part and, where `apart` is not 0, as many that begin `apart` panels further on.
struct Panels {
    std::int64_t begin, end, apart;
};

// The sums of one tile of one part, and what becomes of them. `column`: the part's first output among all.
void run_tile(const Job& job, const Weights& w, Form form, std::int64_t column, std::int64_t row, const Panels& panels) {
    const MatmulCall& c = job.call;
    const std::int64_t row_end = std::min(row + job.tile_rows, job.rows), rows = row_end - row;
    const std::int64_t half = (panels.end - panels.begin) * kPanelOutputs, stride = panels.apart > 0 ? 2 * half : half;
    const std::int64_t sums_count = rows * stride;
    const std::int64_t extra = form >= Form::runs ? (quant_scratch_bytes(w.format, w.width, rows) + 3) / 4 : 0;
    float* sums = scratch_floats(Scratch::task, static_cast<std::size_t>(sums_count + extra));
    if (form >= Form::runs) {
        quant_tile({&w, job.views[form].data, panels.begin, panels.end, panels.apart, row, row_end, sums, stride}, sums + sums_count);
    } else {
        job.kernels.tile({&w, job.views[form], form == Form::pairs, job.few, panels.begin, panels.end, row, row_end, sums, stride});
    }
    const auto store = [&](std::int64_t panel, const float* from) {
        const std::int64_t first = panel * kPanelOutputs, bias_bytes = dtype_bytes(c.bias_type);
        const void* bias = c.bias ? static_cast<const char*>(c.bias) + (column + first) * bias_bytes : nullptr;
        char* out = static_cast<char*>(c.out) + ((job.row_begin + row) * c.out_stride + column + first) * dtype_bytes(c.out_type);
        job.kernels.store_sums({from, stride, bias, c.bias_type, out, c.out_type, c.out_stride, rows, std::min(half, w.outputs - first)});
    };
    store(panels.begin, sums);
    if (panels.apart > 0) store(panels.begin + panels.apart, sums + half);
}

// What one thread reads of a part, few rows: panels [begin, end), `each` of them in a tile. Where a kernel reads two panels at a
// time, they are one of either half, so that the machine, which looks ahead by itself, has no more than two places to look at.
struct Piece {
    std::int64_t begin, end, each;
    bool halves;

    std::int64_t half() const { return (end - begin) / 2; }
    std::int64_t tiles() const { return halves ? (half() + each - 1) / each + (end - begin) % 2 : (end - begin + each - 1) / each; }

    Panels tile(std::int64_t i) const {
        const std::int64_t first = begin + i * each;
        if (!halves) return {first, std::min(first + each, end), 0};
        if (i * each >= half()) return {end - 1, end, 0};
        return {first, std::min(first + each, begin + half()), half()};
    }
};

// The most bytes of weights in a tile for few rows, and how many tiles a thread has of a part at least: so that threads end together.
constexpr std::int64_t kFewBytes = 256 << 10;
constexpr std::int64_t kFewTiles = 12;

// Few rows: the weights pass by once, in a stretch for each thread.
class FewRows {
public:
    FewRows(const Job& job, bool use_pairs, bool alone)
        : job_(job), use_pairs_(use_pairs), stretches_(alone ? 1 : std::min<std::int64_t>(num_threads(), kMostStretches)) {
        for (std::int64_t i = 0; i < job.call.num_parts; ++i) groups_ += groups_of(job.call.parts[i]);
    }

    std::int64_t stretches() const { return stretches_; }

    void operator()(std::int64_t stretch, Items& items) const {
        const MatmulCall& c = job_.call;
        const std::int64_t begin = groups_ * stretch / stretches_, end = groups_ * (stretch + 1) / stretches_;
        std::int64_t first = 0, column = 0, tile = items.take(), before = 0;
        for (const Weights* w = c.parts; w != c.parts + c.num_parts && first < end; ++w) {
            const std::int64_t mine = groups_of(*w);
            if (begin < first + mine) {
                const Piece piece = piece_of(*w, std::max(begin, first) - first, end - first);
                const std::int64_t tiles = piece.tiles();
                for (; tile - before < tiles; tile = items.take()) run_tile(job_, *w, form(*w), column, 0, piece.tile(tile - before));
                before += tiles;
            }
            first += mine;
            column += w->outputs;
        }
    }

private:
    Form form(const Weights& w) const { return form_of(w, use_pairs_); }
    // Panels that a kernel reads side by side where it finds them so.
    std::int64_t group_of(const Weights& w) const { return form(w) < Form::runs ? job_.kernels.stream_panels : 1; }
    std::int64_t groups_of(const Weights& w) const { return (num_panels(w.outputs) + group_of(w) - 1) / group_of(w); }

    Piece piece_of(const Weights& w, std::int64_t begin, std::int64_t end) const {
        const std::int64_t group = group_of(w), bytes = panel_bytes(w.format, w.width, w.group);
        Piece piece{begin * group, std::min(end * group, num_panels(w.outputs)), 1, false};
        piece.halves = form(w) >= Form::runs && quant_streams(w.format, job_.rows) == 2;
        const std::int64_t panels = piece.halves ? piece.half() : piece.end - piece.begin;
        const std::int64_t most = std::min(kFewBytes / (piece.halves ? 2 * bytes : bytes), panels / kFewTiles);
        piece.each = std::max(group, most / group * group);
        return piece;
    }

    Job job_;
    bool use_pairs_;
    std::int64_t stretches_, groups_ = 0;
};

// Tiles of rows and panels.
void run_many(Job& job, bool use_pairs, bool alone) {
    const MatmulCall& c = job.call;
    job.row_tiles = (job.rows + kTileRows - 1) / kTileRows;
    const std::int64_t rows_least = (job.rows + job.row_tiles - 1) / job.row_tiles;
    job.tile_rows = std::min(job.rows, (rows_least + 11) / 12 * 12);
    job.row_tiles = (job.rows + job.tile_rows - 1) / job.tile_rows;
    // Panels as many as leave every thread a few tiles, in whole strides of the kernel where they suffice.
    std::int64_t all_panels = 0;
    for (std::int64_t i = 0; i < c.num_parts; ++i) all_panels += num_panels(c.parts[i].outputs);
    const std::int64_t stride = job.kernels.block_panels;
    const std::int64_t fair = all_panels * job.row_tiles / (static_cast<std::int64_t>(num_threads()) * 6);
    const std::int64_t tile_panels = std::clamp<std::int64_t>(fair >= stride ? fair / stride * stride : fair, 1, kTilePanels);
    const auto tiles_of = [&](const Weights& w) { return (num_panels(w.outputs) + tile_panels - 1) / tile_panels; };

    std::int64_t tiles = 0;
    for (std::int64_t i = 0; i < c.num_parts; ++i) tiles += tiles_of(c.parts[i]) * job.row_tiles;
    const auto run = [&](std::int64_t index) {
        // Rows first: threads that work side by side share the weights in the third cache.
        std::int64_t tile = index / job.row_tiles, column = 0;
        const Weights* w = c.parts;
        for (; tile >= tiles_of(*w); ++w) {
            tile -= tiles_of(*w);
            column += w->outputs;
        }
        const std::int64_t panel = tile * tile_panels;
        const Panels panels{panel, std::min(panel + tile_panels, num_panels(w->outputs)), 0};
        run_tile(job, *w, form_of(*w, use_pairs), column, index % job.row_tiles * job.tile_rows, panels);
    };
    if (alone) {
        for (std::int64_t i = 0; i < tiles; ++i) run(i);
    } else {
        parallel_for(tiles, run);
    }
}

void run_block(Job& job) {
    const MatmulCall& c = job.call;
    const bool use_pairs = job.kernels.pairs && c.x_type == DType::bfloat16;
    bool wanted[num_forms] = {};
    std::int64_t all_outputs = 0;
    for (std::int64_t i = 0; i < c.num_parts; ++i) {
        wanted[form_of(c.parts[i], use_pairs)] = true;
        all_outputs += c.parts[i].outputs;
    }
    std::int64_t bytes = 0;
    for (int form = 0; form < num_forms; ++form) bytes += wanted[form] ? form_bytes(job, form) : 0;
    auto* place = reinterpret_cast<char*>(scratch_floats(Scratch::caller, static_cast<std::size_t>(bytes / 4)));
    for (int form = 0; form < num_forms; ++form) {
        if (!wanted[form]) continue;
        convert_rows(job, form, place);
        place += form_bytes(job, form);
    }
    const bool alone = job.rows * all_outputs * c.width < kSmall;
    if (job.few) {
        const FewRows few(job, use_pairs, alone);
        parallel_stretches(few.stretches(), few);
    } else {
        run_many(job, use_pairs, alone);
    }
}

}  // namespace

const FloatKernels& float_kernels() { return best_table(kTables); }

Matrix::Matrix(std::vector<Weights> all) : parts(std::move(all)), outputs(0), width(parts.empty() ? 0 : parts[0].width) {
    if (parts.empty()) throw std::invalid_argument("Matrix: expected at least one part.");
    for (const Weights& w : parts) {
        if (w.width != width) {
            throw std::invalid_argument("Matrix: parts must have one width, got " + std::to_string(width) + " and " +
                                        std::to_string(w.width) + ".");
        }
        if (w.outputs < 0) throw std::invalid_argument("Matrix: negative number of outputs.");
        if (reinterpret_cast<std::uintptr_t>(w.data) % 64 != 0) throw std::invalid_argument("Matrix: weights must be aligned to 64 bytes.");
        if (!w.data && w.outputs > 0) throw std::invalid_argument("Matrix: weights without data.");
        panel_bytes(w.format, w.width, w.group);
        outputs += w.outputs;
    }
}

void matmul(const MatmulCall& call) {
    const FloatKernels& kernels = float_kernels();
    if (call.rows <= kernels.few_rows) {
        if (call.rows > 0) {
            Job job{call, kernels, 0, call.rows, true};
            run_block(job);
        }
        return;
    }
    const std::int64_t most = std::max<std::int64_t>(2 * kTileRows, kRowsBytes / (call.width * 4) / kTileRows * kTileRows);
    const std::int64_t blocks = (call.rows + most - 1) / most;
    for (std::int64_t i = 0; i < blocks; ++i) {
        const std::int64_t begin = call.rows * i / blocks, end = call.rows * (i + 1) / blocks;
        Job job{call, kernels, begin, end - begin, false};
        run_block(job);
    }
}

}  // namespace canter
