#line 1 "cl_kernels/cpu/decode.cl"
/* SPDX-License-Identifier: Apache-2.0 */
/* Decode for CPUs with wide vectors: one work-item a work-group, as many as compute units, taking work from a
 * counter.
 *
 * A piece of work is a (row, split) with all its KV heads, or some of them where there are few splits; or a split of
 * several rows that have it in the same blocks, which then is read once for all of them. For one row memory
 * decides the speed: one core gets three times the bandwidth from a few long streams that it gets from scattered
 * lines. Four units of 16 tokens are read side by side, each run on through the heads of its block, and every line
 * is prefetched one step ahead in the same streams, across the ends of K, V and the piece. For several rows it is
 * arithmetic, as in a matrix product: register tiles as wide as there are registers, prefetches spread among them.
 *
 * Nothing of a row's arithmetic depends on the piece it is in: lanes are tokens (scores) or dims (values), and sums
 * run in the order of the tokens of the split. */
#include "cpu/append.clh"
#include "cpu/decode_piece.clh"

#define STREAMS 4                                       /* units read side by side */
#define GROUP_TOKENS (STREAMS * UNIT_TOKENS)
#define SPLIT_UNITS (SPLIT_TOKENS / UNIT_TOKENS)
#if SPLIT_TOKENS % 64 != 0
#error "a split is a whole number of four units"
#endif

inline void load_q(__global const Q_ELEM *q, long4 q_view, const piece *now, float scale, float16 *q_rows)
{
    int heads = now->tiles / now->rows * TILE_HEADS;
    for (int kv = 0; kv < now->kv_heads; kv++) {
        for (int i = 0; i < now->rows * heads; i++) {
            long token = now->row[i / heads * ROW_INTS + ROW_Q_TOKEN];
            long head = (now->kv_head + kv) * GROUP + min(now->head + i % heads, GROUP - 1);
            __global const Q_ELEM *row = q + q_view.s0 + token * q_view.s1 + head * q_view.s2;
            for (int v = 0; v < VECTORS; v++)
                q_rows[(PIECE_ROW(now, kv, 0) + i) * VECTORS + v] = load_q_vector(row, v) * scale;
        }
    }
}

/* What four streams read in one step: a part (64 dims) of a KV head. Where several tiles of heads read it, 16-bit
 * elements are widened once for all of them: where `wide` is given, and then it is a constant that it is, vectors come
 * from there. */
typedef const float16 (*wide_parts)[PART_VECTORS * LANES];
#if KV_LAYOUT == LAYOUT_CPU16
#define WIDENS (KV_DTYPE != DTYPE_F32)
typedef __global const KV_ELEM *unit_pointer;
#define LOAD_UNIT(unit, wide, x, i) ((wide) ? (wide)[x][i] : LOAD16_KV((unit)[x] + (i) * LANES))
#define PREFETCH_LINES(p, line, count)                                                                                 \
    EACH_OF(l, 4, count)                                                                                               \
        PREFETCH_NEAR((__global const char *)(p) + ((line) + l) * LINE_BYTES)
#else
typedef const float16 *unit_pointer;
#define LOAD_UNIT(unit, wide, x, i) ((unit)[x][i])
#define PREFETCH_LINES(p, line, count)
#endif
#define VECTOR_BYTES (LANES * (int)sizeof(KV_ELEM))

/* What a step prefetches of the step ahead. A lone tile of heads prefetches line by line as it reads. Several share the
 * lines out evenly: each time a tile comes round it takes those that have become due. So memory is busy all the time,
 * and never asked for more at once than it can keep in flight. */
typedef struct lines_ahead {
    unit_pointer stream[STREAMS];
    int due, pace; /* in 256ths of a line, of all streams */
} lines_ahead;

inline void prefetch_due(lines_ahead *ahead)
{
    int line = ahead->due >> 8;
    ahead->due += ahead->pace;
    for (; line < ahead->due >> 8; line++) {
        PREFETCH_LINES(ahead->stream[line % STREAMS], line / STREAMS, 1);
    }
}

/* Units, or vectors of a part of V, that a register tile takes side by side. A lone tile waits for memory and takes all
 * four, for the sake of its streams. Several wait for arithmetic: where a vector is two registers of sixteen, one is as
 * many as the heads leave room for. */
#define TILE_WIDTH(lone) ((lone) || WIDE_REGISTERS ? 4 : 1)

/* Times in a step that one of several tiles comes round to prefetch: with every four dims, or token of each unit; where
 * few registers are left for that, with each unit or vector. */
#define SCORE_TURNS(dims) (WIDE_REGISTERS ? max((dims) / 4, 1) : STREAMS)
#define VALUE_TURNS(vectors) (WIDE_REGISTERS ? UNIT_TOKENS : (vectors))

/* Adds what one part of the dims, `dims` of them, gives to the scores of a tile of heads against some of the four
 * units, from `from` on. */
MUST_INLINE void add_tile_scores(const float *q, const unit_pointer *unit, wide_parts wide, lines_ahead *ahead,
                                 const bool lone, int from, bool first, int dims, float16 *scores)
{
    const int width = TILE_WIDTH(lone);
    float16 sum[STREAMS][TILE_HEADS];
    EACH_OF(x, STREAMS, width)
        UNROLL for (int h = 0; h < TILE_HEADS; h++)
            sum[x][h] = first ? (float16)(0.0f) : scores[h * SPLIT_UNITS + from + x];
    int d = 0;
    if (!lone && !WIDE_REGISTERS)
        prefetch_due(ahead);
    for (; d + 4 <= dims; d += 4) {
        EACH_OF(x, STREAMS, lone ? width : 0) {
            PREFETCH_LINES(ahead->stream[x], d * VECTOR_BYTES / LINE_BYTES, 4 * VECTOR_BYTES / LINE_BYTES);
        }
        if (!lone && WIDE_REGISTERS)
            prefetch_due(ahead);
        UNROLL for (int u = 0; u < 4; u++) {
            float16 k[STREAMS];
            EACH_OF(x, STREAMS, width)
                k[x] = LOAD_UNIT(unit, wide, from + x, d + u);
            UNROLL for (int h = 0; h < TILE_HEADS; h++)
                EACH_OF(x, STREAMS, width)
                    sum[x][h] = fma((float16)(q[h * PADDED_DIM + d + u]), k[x], sum[x][h]);
        }
    }
    for (; d < dims; d++)
        UNROLL for (int h = 0; h < TILE_HEADS; h++)
            EACH_OF(x, STREAMS, width)
                sum[x][h] = fma((float16)(q[h * PADDED_DIM + d]), LOAD_UNIT(unit, wide, from + x, d), sum[x][h]);
    UNROLL for (int h = 0; h < TILE_HEADS; h++)
        EACH_OF(x, STREAMS, width)
            scores[h * SPLIT_UNITS + from + x] = sum[x][h];
}

/* The same against four units. q: the tile's rows, from the part on. scores: where the first row's go. */
MUST_INLINE void add_scores(const float *q, const unit_pointer *unit, wide_parts wide, lines_ahead *ahead,
                            const bool lone, bool first, int dims, float16 *scores)
{
    for (int from = 0; from < STREAMS; from += TILE_WIDTH(lone))
        add_tile_scores(q, unit, wide, ahead, lone, from, first, dims, scores);
}

/* Dims of a part. */
#define PART_DIMS(part) min(PART_VECTORS * LANES, HEAD_DIM - (part) * PART_VECTORS * LANES)

/* Adds the values of some of the `vectors` of a part, from `from` on. */
MUST_INLINE void add_tile_values(const float *weights, const unit_pointer *unit, wide_parts wide, lines_ahead *ahead,
                                 const bool lone, int from, int skip, int tokens, const int vectors, float16 *acc)
{
    const int count = TILE_WIDTH(lone) < vectors ? TILE_WIDTH(lone) : vectors;
    float16 sum[TILE_HEADS][PART_VECTORS];
    UNROLL for (int h = 0; h < TILE_HEADS; h++)
        EACH_OF(i, PART_VECTORS, count)
            sum[h][i] = acc[h * VECTORS + from + i];
    if (skip == 0 && tokens == GROUP_TOKENS) {
        if (!lone && !WIDE_REGISTERS)
            prefetch_due(ahead);
        for (int t = 0; t < UNIT_TOKENS; t++) {
            if (!lone && WIDE_REGISTERS)
                prefetch_due(ahead);
            UNROLL for (int x = 0; x < STREAMS; x++) {
                if (lone) {
                    PREFETCH_LINES(ahead->stream[x], t * vectors * VECTOR_BYTES / LINE_BYTES,
                                   (vectors * VECTOR_BYTES + LINE_BYTES - 1) / LINE_BYTES);
                }
                float16 v[PART_VECTORS];
                EACH_OF(i, PART_VECTORS, count)
                    v[i] = LOAD_UNIT(unit, wide, x, t * vectors + from + i);
                UNROLL for (int h = 0; h < TILE_HEADS; h++)
                    EACH_OF(i, PART_VECTORS, count)
                        sum[h][i] = fma((float16)(weights[h * SPLIT_TOKENS + x * UNIT_TOKENS + t]), v[i], sum[h][i]);
            }
        }
    } else {
        for (int at = skip; at < tokens; at++) {
            int t = at % UNIT_TOKENS;
            EACH_OF(i, PART_VECTORS, count) {
                float16 v = LOAD_UNIT(unit, wide, at / UNIT_TOKENS, t * vectors + from + i);
                UNROLL for (int h = 0; h < TILE_HEADS; h++)
                    sum[h][i] = fma((float16)(weights[h * SPLIT_TOKENS + at]), v, sum[h][i]);
            }
        }
    }
    UNROLL for (int h = 0; h < TILE_HEADS; h++)
        EACH_OF(i, PART_VECTORS, count)
            acc[h * VECTORS + from + i] = sum[h][i];
}

/* Adds the values of one part and up to four units to a tile's accumulators. weights: of the tile's first row and
 * the first unit. Of the 64 tokens the row sees those from `skip` to `tokens`; only they are read. vectors: of the
 * part, a constant where this is called; the loops name the larger bound too, so that they unroll before they are
 * inlined. */
MUST_INLINE void add_values(const float *weights, const unit_pointer *unit, wide_parts wide, lines_ahead *ahead,
                            const bool lone, int skip, int tokens, const int vectors, float16 *acc)
{
    for (int from = 0; from < vectors; from += TILE_WIDTH(lone))
        add_tile_values(weights, unit, wide, ahead, lone, from, skip, tokens, vectors, acc);
}

/* Turns a row's scores of a split into weights; the lanes before `skip` and past `tokens` are selected away. */
inline void softmax_row(float16 *scores, int skip, int tokens, float *row_max, float *row_sum)
{
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int units = (tokens + UNIT_TOKENS - 1) / UNIT_TOKENS;
    if (tokens % UNIT_TOKENS != 0)
        scores[units - 1] = select((float16)(-INFINITY), scores[units - 1], lane < tokens % UNIT_TOKENS);
    if (skip > 0)
        scores[0] = select((float16)(-INFINITY), scores[0], lane >= skip);
    float16 highest = (float16)(NEGATIVE);
    for (int u = 0; u < units; u++)
        highest = GREATER(scores[u], highest);
    float m = ROUND_MAXIMUM(max_lanes(highest));
    float16 sum = (float16)(0.0f);
    for (int u = 0; u < units; u++) {
        scores[u] = exp2_below(scores[u], m);
        sum += scores[u];
    }
    *row_max = m;
    *row_sum = sum_lanes(sum);
}

/* Scores of a piece become weights. */
inline void softmax_piece(const piece *now, float16 *scores, float *row_max, float *row_sum)
{
    int heads = now->tiles / now->rows * TILE_HEADS, units = (now->tokens + UNIT_TOKENS - 1) / UNIT_TOKENS;
    for (int kv = 0; kv < now->kv_heads; kv++) {
        int first = PIECE_ROW(now, kv, 0), rows = PIECE_ROW(now, kv, now->tiles) - first;
        for (int i = 0; i < rows; i++) {
            int head = (now->kv_head + kv) * GROUP + min(now->head + i % heads, GROUP - 1);
            float16 *row = scores + (first + i) * SPLIT_UNITS;
            change_scores(row, units, head, now->first_token, now->row[i / heads * ROW_INTS + ROW_VISIBLE] - 1);
            softmax_row(row, now->skip, now->tokens, row_max + first + i, row_sum + first + i);
        }
    }
}

inline void store_partials(__global float *partials, int num_heads, const piece *now, const float16 *acc,
                           const float *row_max, const float *row_sum)
{
    int heads = now->tiles / now->rows * TILE_HEADS;
    for (int kv = 0; kv < now->kv_heads; kv++) {
        for (int i = 0; i < now->rows * heads; i++) {
            if (now->head + i % heads >= GROUP)
                continue;
            int row = PIECE_ROW(now, kv, 0) + i;
            long index = now->row[i / heads * ROW_INTS + ROW_PARTIAL] + now->split;
            long head = (now->kv_head + kv) * GROUP + now->head + i % heads;
            __global float *partial = partials + (index * num_heads + head) * PARTIAL_STRIDE(HEAD_DIM);
            for (int v = 0; v < VECTORS; v++)
                store16_f32(acc[row * VECTORS + v], partial + v * LANES);
            partial[PARTIAL_M(HEAD_DIM)] = row_max[row];
            partial[PARTIAL_L(HEAD_DIM)] = row_sum[row];
        }
    }
}

#if KV_LAYOUT == LAYOUT_CPU16
/* Units of the piece's first KV head, K's, then V's, each padded to whole groups with the last unit; then the first
 * group of K of the piece that comes next, only to be prefetched. */
typedef struct streams {
    unit_pointer unit[2 * SPLIT_UNITS + STREAMS];
    int groups; /* of K, and of V */
} streams;

inline unit_pointer find_unit(__global const KV_ELEM *data, long4 view, __global const int *table, const piece *at,
                              int unit)
{
    int last = (at->tokens + UNIT_TOKENS - 1) / UNIT_TOKENS - 1;
    return data + unit_offset(table, at->table, view, at->first_token + min(unit, last) * UNIT_TOKENS, at->kv_head);
}

inline void find_streams(__global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v, long4 v_view,
                         __global const int *table, const piece *now, const piece *next, streams *found)
{
    int units = (now->tokens + GROUP_TOKENS - 1) / GROUP_TOKENS * STREAMS;
    for (int u = 0; u < units; u++) {
        found->unit[u] = find_unit(k, k_view, table, now, u);
        found->unit[units + u] = find_unit(v, v_view, table, now, u);
    }
    for (int x = 0; x < STREAMS; x++)
        found->unit[2 * units + x] = next->tokens > 0 ? find_unit(k, k_view, table, next, x) : found->unit[x];
    found->groups = units / STREAMS;
}

/* Steps between reading and prefetching: one part, or a whole head where its parts are not alike. */
#define STEPS_AHEAD (LAST_VECTORS == 0 ? 1 : PARTS)

/* One step: where four streams read, and what they prefetch, of the step STEPS_AHEAD steps on. */
typedef struct reading {
    unit_pointer unit[STREAMS];
    lines_ahead ahead;
} reading;

inline reading find_reading(const unit_pointer *unit, const piece *now, long head_stride, int kv, int part)
{
    reading found;
    int steps = now->kv_heads * PARTS;
    int at = kv * PARTS + part + STEPS_AHEAD;
    bool beyond = at >= steps;
    if (beyond)
        at -= steps;
    long offset = at / PARTS * head_stride + at % PARTS * PART;
    for (int x = 0; x < STREAMS; x++) {
        found.unit[x] = unit[x] + kv * head_stride + part * PART;
        found.ahead.stream[x] = unit[beyond ? STREAMS + x : x] + offset;
    }
    found.ahead.due = found.ahead.pace = 0;
    return found;
}

/* Shares the lines of a step, `vectors` of each stream, out to so many turns. */
inline void share_lines(lines_ahead *ahead, int vectors, int turns)
{
    int lines = (vectors * VECTOR_BYTES + LINE_BYTES - 1) / LINE_BYTES * STREAMS;
    ahead->pace = (lines * 256 + turns - 1) / turns;
}

/* Widens `count` vectors of each stream. */
inline void widen_part(const reading *at, int count, float16 (*wide)[PART_VECTORS * LANES])
{
    for (int x = 0; x < STREAMS; x++)
        for (int i = 0; i < count; i++)
            wide[x][i] = LOAD16_KV(at->unit[x] + i * LANES);
}

#if WIDENS
#define WIDE(wide) (wide)
#else
#define WIDE(wide) 0
#endif

inline void score_piece(const streams *from, const piece *now, long head_stride, const float16 *q_rows, float16 *scores)
{
    bool several = now->tiles > 1;
    for (int group = 0; group < from->groups; group++) {
        for (int kv = 0; kv < now->kv_heads; kv++) {
            for (int part = 0; part < PARTS; part++) {
                reading at = find_reading(from->unit + group * STREAMS, now, head_stride, kv, part);
                float16 wide[STREAMS][PART_VECTORS * LANES];
                if (WIDENS && several)
                    widen_part(&at, PART_DIMS(part), wide);
                share_lines(&at.ahead, PART_DIMS(part), now->tiles * SCORE_TURNS(PART_DIMS(part)));
                for (int tile = 0; tile < now->tiles; tile++) {
                    int row = PIECE_ROW(now, kv, tile);
                    const float *q = (const float *)(q_rows + row * VECTORS + part * PART_VECTORS);
                    float16 *sums = scores + row * SPLIT_UNITS + group * STREAMS;
                    if (several)
                        add_scores(q, at.unit, WIDE(wide), &at.ahead, false, part == 0, PART_DIMS(part), sums);
                    else
                        add_scores(q, at.unit, 0, &at.ahead, true, part == 0, PART_DIMS(part), sums);
                }
            }
        }
    }
}

inline void sum_piece(const streams *from, const piece *now, long head_stride, const float16 *scores, float16 *acc)
{
    bool several = now->tiles > 1;
    for (int group = 0; group < from->groups; group++) {
        int tokens = min(now->tokens - group * GROUP_TOKENS, GROUP_TOKENS), skip = group == 0 ? now->skip : 0;
        for (int kv = 0; kv < now->kv_heads; kv++) {
            for (int part = 0; part < PARTS; part++) {
                reading at = find_reading(from->unit + (from->groups + group) * STREAMS, now, head_stride, kv, part);
                float16 wide[STREAMS][PART_VECTORS * LANES];
                int vectors = part < FULL_PARTS ? PART_VECTORS : LAST_VECTORS;
                if (WIDENS && several)
                    widen_part(&at, UNIT_TOKENS * vectors, wide);
                share_lines(&at.ahead, UNIT_TOKENS * vectors, now->tiles * VALUE_TURNS(vectors));
                for (int tile = 0; tile < now->tiles; tile++) {
                    int row = PIECE_ROW(now, kv, tile);
                    const float *weights = (const float *)(scores + row * SPLIT_UNITS + group * STREAMS);
                    float16 *sums = acc + row * VECTORS + part * PART_VECTORS;
                    if (several && part < FULL_PARTS)
                        add_values(weights, at.unit, WIDE(wide), &at.ahead, false, skip, tokens, PART_VECTORS, sums);
                    else if (several)
                        add_values(weights, at.unit, WIDE(wide), &at.ahead, false, skip, tokens, LAST_VECTORS, sums);
                    else if (part < FULL_PARTS)
                        add_values(weights, at.unit, 0, &at.ahead, true, skip, tokens, PART_VECTORS, sums);
                    else
                        add_values(weights, at.unit, 0, &at.ahead, true, skip, tokens, LAST_VECTORS, sums);
                }
            }
        }
    }
}
#else
/* Offsets of the rows of a group of tokens in the piece's first KV head. */
inline int find_group(__global const int *table, long4 view, const piece *now, int group, long *at)
{
    int first = group * GROUP_TOKENS;
    int tokens = min(now->tokens - first, GROUP_TOKENS);
    token_offsets(table, now->table, view, now->first_token + first, group == 0 ? now->skip : 0, tokens, GROUP_TOKENS,
                  now->kv_head, at);
    return tokens;
}

inline void score_piece(__global const KV_ELEM *k, long4 view, __global const int *table, const piece *now,
                        const float16 *q_rows, float16 *scores)
{
    float16 staged[STREAMS][PADDED_DIM];
    const unit_pointer unit[STREAMS] = {staged[0], staged[1], staged[2], staged[3]};
    lines_ahead none = {{0}, 0, 0};
    for (int group = 0; group * GROUP_TOKENS < now->tokens; group++) {
        long at[GROUP_TOKENS];
        find_group(table, view, now, group, at);
        for (int kv = 0; kv < now->kv_heads; kv++) {
            for (int x = 0; x < STREAMS; x++)
                stage_k(k + kv * view.s3, at + x * UNIT_TOKENS, kv + 1 < now->kv_heads ? view.s3 : 0, staged[x]);
            for (int tile = 0; tile < now->tiles; tile++)
                add_scores((const float *)(q_rows + PIECE_ROW(now, kv, tile) * VECTORS), unit, 0, &none, false, true,
                           HEAD_DIM, scores + PIECE_ROW(now, kv, tile) * SPLIT_UNITS + group * STREAMS);
        }
    }
}

inline void sum_piece(__global const KV_ELEM *v, long4 view, __global const int *table, const piece *now,
                      const float16 *scores, float16 *acc)
{
    float16 staged[STREAMS][PADDED_DIM];
    lines_ahead none = {{0}, 0, 0};
    for (int group = 0; group * GROUP_TOKENS < now->tokens; group++) {
        long at[GROUP_TOKENS];
        int skip = group == 0 ? now->skip : 0;
        int tokens = find_group(table, view, now, group, at);
        for (int kv = 0; kv < now->kv_heads; kv++) {
            for (int x = 0; x < STREAMS; x++)
                stage_v(v + kv * view.s3, at + x * UNIT_TOKENS, kv + 1 < now->kv_heads ? view.s3 : 0, staged[x]);
            for (int i = 0; i < now->tiles * PARTS; i++) {
                int part = i % PARTS, row = PIECE_ROW(now, kv, i / PARTS);
                unit_pointer unit[STREAMS];
                for (int x = 0; x < STREAMS; x++)
                    unit[x] = staged[x] + part * PART / LANES;
                const float *weights = (const float *)(scores + row * SPLIT_UNITS + group * STREAMS);
                float16 *sums = acc + row * VECTORS + part * PART_VECTORS;
                if (part < FULL_PARTS)
                    add_values(weights, unit, 0, &none, false, skip, tokens, PART_VECTORS, sums);
                else
                    add_values(weights, unit, 0, &none, false, skip, tokens, LAST_VECTORS, sums);
            }
        }
    }
}
#endif

/* The row's new token goes to its slot, with the piece's KV heads, where the piece has the row's last key: before any
 * key is read. No other row reads that block (lib/attention/fuse.c). Pieces of one group of heads write the same. */
inline void append_new(const piece *now, __global const uchar *k_source, long4 k_from, __global const uchar *v_source,
                       long4 v_from, __global KV_ELEM *k, long4 k_view, __global KV_ELEM *v, long4 v_view,
                       __global const long *slots, int num_blocks, int4 shape)
{
    if (now->tokens == 0 || now->first_token + now->tokens != now->row[ROW_VISIBLE])
        return;
    long token = now->row[ROW_Q_TOKEN], slot = slots[token];
    if (slot < 0 || slot >= (long)num_blocks * BLOCK_SIZE)
        return;
    int block = (int)(slot / BLOCK_SIZE), in_block = (int)(slot % BLOCK_SIZE);
    for (int head = now->kv_head; head < now->kv_head + now->kv_heads; head++) {
        store_key(k_source, k_from.s0 + token * k_from.s1 + head * k_from.s2, (int)k_from.s3,
                  (__global kv_raw *)k + tile_start(k_view, block, head), k_view, in_block, shape, false);
        store_row(v_source, v_from.s0 + token * v_from.s1 + head * v_from.s2, (int)v_from.s3,
                  (__global kv_raw *)v + tile_start(v_view, block, head), v_view, 1, in_block, shape, false);
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_decode(const decode_values in, __global const Q_ELEM *q, __global KV_ELEM *k, __global KV_ELEM *v,
           __global const int *table, __global int *meta, __global const uchar *k_source,
           __global const uchar *v_source)
{
    FIND_BUFFERS(q, k, v, k_source, v_source);
    float16 q_rows[PIECE_ROWS * VECTORS], acc[PIECE_ROWS * VECTORS], scores[PIECE_ROWS * SPLIT_UNITS];
    float row_max[PIECE_ROWS], row_sum[PIECE_ROWS];
    int kv_heads = heads_of_pieces(in.shape.s1, in.work.s2);
    int pieces = in.work.s2 * ((in.shape.s1 + kv_heads - 1) / kv_heads) * GROUP_PIECES;
    __global int *counter = meta;
    int index = take_work(counter);
    while (index < pieces) {
        int following = take_work(counter);
        piece now = find_piece(meta, in.work, in.shape.s1, kv_heads, index);
        if (in.slots.s0 >= 0)
            append_new(&now, k_source, in.k_source_view, v_source, in.v_source_view, k, in.k_view, v, in.v_view,
                       (__global const long *)(meta + in.slots.s0), in.work.s3, in.shape);
        load_q(q, in.q_view, &now, in.scale_log2, q_rows);
        for (int i = 0; i < PIECE_ROW(&now, now.kv_heads, 0) * VECTORS; i++)
            acc[i] = (float16)(0.0f);
#if KV_LAYOUT == LAYOUT_CPU16
        piece next = find_piece(meta, in.work, in.shape.s1, kv_heads, min(following, pieces - 1));
        streams from;
        find_streams(k, in.k_view, v, in.v_view, table, &now, &next, &from);
        score_piece(&from, &now, in.k_view.s3, q_rows, scores);
#else
        score_piece(k, in.k_view, table, &now, q_rows, scores);
#endif
        softmax_piece(&now, scores, row_max, row_sum);
#if KV_LAYOUT == LAYOUT_CPU16
        sum_piece(&from, &now, in.v_view.s3, scores, acc);
#else
        sum_piece(v, in.v_view, table, &now, scores, acc);
#endif
        store_partials((__global float *)(meta + in.workspace.s1), in.shape.s0, &now, acc, row_max, row_sum);
        index = following;
    }
    finish_work(counter);
}

/* A partial, or several folded: an accumulator of VECTORS, relative to the maximum m, and the sum l. */
typedef struct folded {
    float16 acc[VECTORS];
    float m, l;
} folded;

inline void load_partial(__global const float *partial, folded *out)
{
    for (int v = 0; v < VECTORS; v++)
        out->acc[v] = load16_f32(partial + v * LANES);
    out->m = partial[PARTIAL_M(HEAD_DIM)];
    out->l = partial[PARTIAL_L(HEAD_DIM)];
}

/* left = left and right. Maxima are integers, so every factor is a power of two. */
inline void combine(folded *left, const folded *right)
{
    float m = left->m > right->m ? left->m : right->m;
    float a = exp2_integer(left->m - m), b = exp2_integer(right->m - m);
    left->l = fma(b, right->l, a * left->l);
    for (int v = 0; v < VECTORS; v++)
        left->acc[v] = fma((float16)(b), right->acc[v], (float16)(a) * left->acc[v]);
    left->m = m;
}

#define MOST_LEVELS 26 /* of a tree over all splits of 2^31 tokens */

/* Folds the partials of a (row, head) in the fixed binary tree: the stack holds a node a set bit of the number of
 * leaves taken so far, and at the end those wait for right children that are missing, which are neutral. */
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_fold(__global const int *meta, __global OUT_ELEM *out, long4 out_view, __global float *lse, long4 lse_view,
         int4 shape, long2 work)
{
    folded stack[MOST_LEVELS];
    int index = (int)get_global_id(0) / shape.s0, head = (int)get_global_id(0) % shape.s0;
    __global const int *row = meta + work.s0 + index * ROW_INTS;
    __global const float *partials = (__global const float *)(meta + work.s1);
    int splits = splits_of_row(row);
    int depth = 0;
    for (int split = 0; split < splits; split++) {
        load_partial(partials + (((long)row[ROW_PARTIAL] + split) * shape.s0 + head) * PARTIAL_STRIDE(HEAD_DIM),
                     stack + depth++);
        for (int leaves = split + 1; leaves % 2 == 0; leaves /= 2, depth--)
            combine(stack + depth - 2, stack + depth - 1);
    }
    for (; depth > 1; depth--)
        combine(stack + depth - 2, stack + depth - 1);

    long token = row[ROW_Q_TOKEN];
    __global OUT_ELEM *to = out + out_view.s0 + token * out_view.s1 + head * out_view.s2;
    float inverse = stack[0].l == 0.0f ? 0.0f : 1.0f / stack[0].l;
    for (int v = 0; v < VECTORS; v++)
        store_out_vector(stack[0].acc[v] * inverse, to, v);
    if (lse_view.s3 != 0)
        lse[lse_view.s0 + token * lse_view.s1 + head * lse_view.s2] = natural_lse(stack[0].m, stack[0].l);
}
