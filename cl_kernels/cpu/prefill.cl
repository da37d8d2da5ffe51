#line 1 "cl_kernels/cpu/prefill.cl"
/* SPDX-License-Identifier: Apache-2.0 */
/* Prefill for CPUs with wide vectors: one work-item a work-group, as many as compute units, taking claims (runs of
 * items) from a counter.
 *
 * An item is some queries times tile_heads heads of one KV head. Its rows, scores and accumulators stay in the
 * second level cache; keys come in tiles of 256 tokens at fixed absolute positions. Both products run in register
 * tiles of six rows by four vectors: 24 accumulators, four vectors of K or V and a broadcast row element among 32
 * registers, so that ten loads feed 24 multiply-adds. Where a vector takes two registers or more, the tiles are one
 * vector wide.
 *
 * A row's bits don't depend on the tile, the item or the chunk it is in: its sums run over the same keys in the same
 * order, what it doesn't see is selected away, and its maximum, rounded to an integer in the log2 domain, makes
 * every rescaling an exact power of two. */
#include "cpu/units.clh"

#define TILE_TOKENS 256
#define TILE_UNITS (TILE_TOKENS / UNIT_TOKENS)
#define PANEL_UNITS 4 /* units of K read side by side */
#define PANEL_TOKENS (PANEL_UNITS * UNIT_TOKENS)
#define ROWS 6 /* rows of a register tile: a row group */
#define MOST_GROUPS ((TILE_ROWS + ROWS - 1) / ROWS)
#define MOST_ROWS (MOST_GROUPS * ROWS)

/* float32 in the packed layout is read where it lies; everything else is widened or transposed first, which the rows of
 * an item share. */
#if KV_LAYOUT == LAYOUT_CPU16 && KV_DTYPE == DTYPE_F32
#define STAGED 0
typedef __global const float *unit_pointer;
#define LOAD_UNIT(p, i) load16_f32((p) + (i) * LANES)
#else
#define STAGED 1
typedef const float *unit_pointer;
#define LOAD_UNIT(p, i) (((const float16 *)(p))[i])
#endif

typedef struct tile {
    int q_token, queries; /* rows of q, out and lse */
    int kv_head, head, heads;
    int rows, groups;
    int table;
    int kv_len;           /* of the sequence */
    int position;         /* of the first query */
    __global const int *entry;
} tile;

/* What an item keeps in private memory. Rows are [query][head]; those past the last repeat it and are not stored. */
typedef struct state {
    float16 q[MOST_ROWS * VECTORS];
    float16 scores[MOST_ROWS * TILE_UNITS];
    float16 acc[MOST_ROWS * VECTORS];
    float16 sum[MOST_ROWS];
    float maximum[MOST_ROWS], rescale[MOST_ROWS];
    int first[MOST_ROWS], visible[MOST_ROWS]; /* the first key a row sees, and the end of those it sees; ascending */
#if STAGED
    float16 k[PANEL_UNITS][PADDED_DIM];
    float16 v[TILE_UNITS][PADDED_DIM];
#define STAGED_K(at) ((at)->k)
#define STAGED_V(at) ((at)->v)
#else
#define STAGED_K(at) 0
#define STAGED_V(at) 0
#endif
} state;

/* Where results go. */
typedef struct outputs {
    __global OUT_ELEM *out;
    long4 out_view;
    __global float *lse;
    long4 lse_view;
    bool stream; /* every vector of out is aligned */
} outputs;

inline tile find_tile(__global const int *meta, int4 work, int4 work2, int index)
{
    tile found;
    __global const int *item = meta + work.s1 + index * ITEM_INTS;
    __global const int *entry = meta + work.s0 + item[ITEM_ENTRY] * ENTRY_INTS;
    int query = item[ITEM_QUERY];
    found.q_token = entry[ENTRY_Q_START] + query;
    found.queries = item[ITEM_QUERIES];
    found.kv_head = item[ITEM_KV_HEAD];
    found.head = item[ITEM_HEAD];
    found.heads = min(work2.s2, GROUP - found.head);
    found.rows = found.queries * found.heads;
    found.groups = (found.rows + ROWS - 1) / ROWS;
    found.table = entry[ENTRY_TABLE];
    found.kv_len = entry[ENTRY_KV_LEN];
    found.position = query + found.kv_len - entry[ENTRY_Q_LEN];
    found.entry = entry;
    return found;
}

inline __global const Q_ELEM *q_row(__global const Q_ELEM *q, long4 q_view, const tile *now, int row)
{
    long token = now->q_token + row / now->heads;
    long head = now->kv_head * GROUP + now->head + row % now->heads;
    return q + q_view.s0 + token * q_view.s1 + head * q_view.s2;
}

/* Brings the rows of an item in, scaled. */
inline void load_rows(__global const Q_ELEM *q, long4 q_view, const tile *now, float scale, state *at)
{
    for (int r = 0; r < now->groups * ROWS; r++) {
        int row = min(r, now->rows - 1);
        __global const Q_ELEM *from = q_row(q, q_view, now, row);
        for (int v = 0; v < VECTORS; v++) {
            at->q[r * VECTORS + v] = load_q_vector(from, v) * scale;
            at->acc[r * VECTORS + v] = (float16)(0.0f);
        }
        at->first[r] = find_first(now->entry, now->position + row / now->heads);
        at->visible[r] = max(find_last(now->entry, now->position + row / now->heads) + 1, 0);
        at->maximum[r] = NEGATIVE;
        at->sum[r] = (float16)(0.0f);
    }
}

/* Touches a row of the next item. */
inline void prefetch_row(__global const Q_ELEM *q, long4 q_view, const tile *next, int row)
{
    __global const char *from = (__global const char *)q_row(q, q_view, next, row);
    for (int at = 0; at < HEAD_DIM * (int)sizeof(Q_ELEM); at += LINE_BYTES)
        PREFETCH_FAR(from + at);
}

/* Scores of six rows against 1 to 4 units of K (a constant where this is called; the loops name the larger bound
 * too, so that they unroll before they are inlined). */
MUST_INLINE void score_rows(const float *q, const unit_pointer *k, const int units, float16 *scores)
{
    float16 sum[ROWS][PANEL_UNITS];
    UNROLL for (int r = 0; r < ROWS; r++)
        EACH_OF(j, PANEL_UNITS, units)
            sum[r][j] = (float16)(0.0f);
    int d = 0;
    for (; d + 2 <= HEAD_DIM; d += 2) {
        UNROLL for (int u = 0; u < 2; u++) {
            float16 x[PANEL_UNITS];
            EACH_OF(j, PANEL_UNITS, units)
                x[j] = LOAD_UNIT(k[j], d + u);
            UNROLL for (int r = 0; r < ROWS; r++)
                EACH_OF(j, PANEL_UNITS, units)
                    sum[r][j] = fma((float16)(q[r * PADDED_DIM + d + u]), x[j], sum[r][j]);
        }
    }
    for (; d < HEAD_DIM; d++)
        UNROLL for (int r = 0; r < ROWS; r++)
            EACH_OF(j, PANEL_UNITS, units)
                sum[r][j] = fma((float16)(q[r * PADDED_DIM + d]), LOAD_UNIT(k[j], d), sum[r][j]);
    UNROLL for (int r = 0; r < ROWS; r++)
        EACH_OF(j, PANEL_UNITS, units)
            scores[r * TILE_UNITS + j] = sum[r][j];
}

/* Turns a row's scores of a tile into weights relative to its new maximum. The row sees `first` .. visible-1 of this
 * tile's tokens. units: what its row group computed, rounded up to a pair; the two sums run over even and odd units
 * whatever their number. */
inline void softmax_row(int row, int first, int visible, int units, state *at)
{
    const int16 lane = (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float16 *scores = at->scores + row * TILE_UNITS;
    for (int u = clamp(visible / UNIT_TOKENS, 0, units); u < units; u++)
        scores[u] = select((float16)(-INFINITY), scores[u], lane + u * UNIT_TOKENS < visible);
    for (int u = 0; u < units && u * UNIT_TOKENS < first; u++)
        scores[u] = select((float16)(-INFINITY), scores[u], lane + u * UNIT_TOKENS >= first);
    float before = at->maximum[row];
    float16 even = (float16)(before), odd = even;
    for (int u = 0; u < units; u += 2) {
        even = GREATER(scores[u], even);
        odd = GREATER(scores[u + 1], odd);
    }
    float m = ROUND_MAXIMUM(max_lanes(GREATER(odd, even)));
    float16 even_sum = (float16)(0.0f), odd_sum = even_sum;
    for (int u = 0; u < units; u += 2) {
        float16 a = exp2_below(scores[u], m), b = exp2_below(scores[u + 1], m);
        scores[u] = a;
        scores[u + 1] = b;
        even_sum += a;
        odd_sum += b;
    }
    float rescale = exp2_integer(before - m);
    at->maximum[row] = m;
    at->rescale[row] = rescale;
    at->sum[row] = fma(at->sum[row], (float16)(rescale), even_sum + odd_sum);
}

/* Adds a token's values to the accumulators of those of six rows that see it; `weights` are its, a tile apart. */
MUST_INLINE void add_token(const float *weights, unit_pointer values, const int vectors, int token, const int *first,
                           const int *visible, float16 (*sum)[PART_VECTORS])
{
    UNROLL for (int r = 0; r < ROWS; r++) {
        int16 seen = (int16)((!WINDOWED || token >= first[r]) && token < visible[r] ? -1 : 0);
        float16 weight = (float16)(weights[r * TILE_TOKENS]);
        EACH_OF(i, PART_VECTORS, vectors)
            sum[r][i] = select(sum[r][i], fma(weight, LOAD_UNIT(values, i), sum[r][i]), seen);
    }
}

/* Adds the values of a tile's tokens to the accumulators of six rows, each those that it sees, first[row] ..
 * visible[row]-1: `vectors` (a constant where this is called) that begin `offset` into each unit and lie `stride`
 * elements a token apart. */
MUST_INLINE void add_values(const float *weights, const unit_pointer *v, int offset, int stride, const int vectors,
                            const int *first, const int *visible, float16 (*sum)[PART_VECTORS])
{
    int all = clamp(visible[0], 0, TILE_TOKENS), tokens = min(visible[ROWS - 1], TILE_TOKENS);
    for (int u = 0; u * UNIT_TOKENS < tokens; u++, weights += UNIT_TOKENS) {
        int end = min(UNIT_TOKENS, tokens - u * UNIT_TOKENS), open = min(UNIT_TOKENS, all - u * UNIT_TOKENS);
        int t = WINDOWED ? clamp(first[0] - u * UNIT_TOKENS, 0, UNIT_TOKENS) : 0;
        unit_pointer values = v[u] + offset + t * stride;
        /* Intel's vectoriser fails on the same bound as a condition of the loop. */
        for (int lead = WINDOWED ? min(first[ROWS - 1] - u * UNIT_TOKENS, end) : 0; t < lead; t++, values += stride)
            add_token(weights + t, values, vectors, u * UNIT_TOKENS + t, first, visible, sum);
        for (; t + 2 <= open; t += 2, values += 2 * stride) {
            UNROLL for (int s = 0; s < 2; s++) {
                float16 x[PART_VECTORS];
                EACH_OF(i, PART_VECTORS, vectors)
                    x[i] = LOAD_UNIT(values + s * stride, i);
                UNROLL for (int r = 0; r < ROWS; r++)
                    EACH_OF(i, PART_VECTORS, vectors)
                        sum[r][i] = fma((float16)(weights[r * TILE_TOKENS + t + s]), x[i], sum[r][i]);
            }
        }
        for (; t < end; t++, values += stride)
            add_token(weights + t, values, vectors, u * UNIT_TOKENS + t, first, visible, sum);
    }
}

/* Writes vectors of six finished rows, from `first` on, and their LSE with the first. */
MUST_INLINE void store_rows(const tile *now, int group, int first, const int vectors, float16 (*sum)[PART_VECTORS],
                            const state *at, const outputs *to)
{
    UNROLL for (int r = 0; r < ROWS; r++) {
        int row = group * ROWS + r;
        if (row >= now->rows)
            continue;
        float l = sum_lanes(at->sum[row]);
        float inverse = l == 0.0f ? 0.0f : 1.0f / l;
        long token = now->q_token + row / now->heads;
        long head = now->kv_head * GROUP + now->head + row % now->heads;
        __global OUT_ELEM *out = to->out + to->out_view.s0 + token * to->out_view.s1 + head * to->out_view.s2;
        EACH_OF(i, PART_VECTORS, vectors) {
            float16 x = sum[r][i] * inverse;
            if (CAN_STREAM && to->stream)
                STREAM_OUT_VECTOR(x, out, first + i);
            else
                store_out_vector(x, out, first + i);
        }
        if (first == 0 && to->lse_view.s3 != 0)
            to->lse[to->lse_view.s0 + token * to->lse_view.s1 + head * to->lse_view.s2] =
                natural_lse(at->maximum[row], l);
    }
}

/* Values of a tile of keys for one row group: `vectors` (a constant where this is called) from `first` on, of a part
 * `width` vectors wide. The last tile of keys that the group sees finishes it. */
MUST_INLINE void attend_group(const tile *now, int group, int first, const int vectors, int width,
                              const unit_pointer *v, int first_token, state *at, const outputs *to)
{
    const int row = group * ROWS;
    float16 *acc = at->acc + row * VECTORS + first;
    int from[ROWS], visible[ROWS];
    float16 sum[ROWS][PART_VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        from[r] = at->first[row + r] - first_token;
        visible[r] = at->visible[row + r] - first_token;
        EACH_OF(i, PART_VECTORS, vectors)
            sum[r][i] = acc[r * VECTORS + i] * at->rescale[row + r];
    }
    int offset = first / PART_VECTORS * PART + first % PART_VECTORS * LANES;
    add_values((const float *)(at->scores + row * TILE_UNITS), v, offset, width * LANES, vectors,
               from, visible, sum);
    if (visible[ROWS - 1] <= TILE_TOKENS) {
        store_rows(now, group, first, vectors, sum, at, to);
        return;
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        EACH_OF(i, PART_VECTORS, vectors)
            acc[r * VECTORS + i] = sum[r][i];
}

/* Finds, or stages in `staged`, `units` (> 0) units of K or V. What lies before `least`, the first key that the item's
 * rows see, is not read: of those units and tokens the first ones from there on are taken. */
inline void find_units(__global const KV_ELEM *data, long4 view, __global const int *table, const tile *now, int least,
                       int token, int units, int value, float16 (*staged)[PADDED_DIM], unit_pointer *found)
{
    for (int u = 0; u < units; u++) {
        int first = max(token + u * UNIT_TOKENS, least / UNIT_TOKENS * UNIT_TOKENS);
#if KV_LAYOUT == LAYOUT_CPU16
        __global const KV_ELEM *unit = data + unit_offset(table, now->table, view, first, now->kv_head);
#if STAGED
        widen_unit(unit, staged[u]);
        found[u] = (const float *)staged[u];
#else
        found[u] = unit;
#endif
#else
        long rows[UNIT_TOKENS];
        token_offsets(table, now->table, view, first, max(least - first, 0), min(UNIT_TOKENS, now->kv_len - first),
                      UNIT_TOKENS, now->kv_head, rows);
        if (value)
            stage_v(data, rows, 0, staged[u]);
        else
            stage_k(data, rows, 0, staged[u]);
        found[u] = (const float *)staged[u];
#endif
    }
}

/* Scores of a row group against as many units of a panel as it sees. */
inline void score_group(const state *at, int group, const unit_pointer *k, int units, float16 *scores)
{
    const float *q = (const float *)(at->q + group * ROWS * VECTORS);
#if !WIDE_REGISTERS
    for (int j = 0; j < PANEL_UNITS && j < units; j++)
        score_rows(q, k + j, 1, scores + j);
#else
    if (units >= 4)
        score_rows(q, k, 4, scores);
    else if (units == 3)
        score_rows(q, k, 3, scores);
    else if (units == 2)
        score_rows(q, k, 2, scores);
    else
        score_rows(q, k, 1, scores);
#endif
}

/* Keys from a token on up to the last that the rows of a group see: the last row sees furthest. */
inline int seen_by_group(const state *at, int group, int first_token)
{
    return at->visible[group * ROWS + ROWS - 1] - first_token;
}

inline int units_of(int tokens)
{
    return (tokens + UNIT_TOKENS - 1) / UNIT_TOKENS;
}

/* Scores of the item's rows against a tile of `tokens` keys. Meanwhile the next item's rows are brought nearer. */
inline void score_tile(__global const KV_ELEM *k, long4 k_view, __global const int *table, const tile *now, int first,
                       int tokens, state *at, __global const Q_ELEM *q, long4 q_view, const tile *next)
{
    /* The last register tiles of the item touch `share` rows each. */
    int steps = (seen_by_group(at, now->groups - 1, first) + PANEL_TOKENS - 1) / PANEL_TOKENS * now->groups;
    int share = (next->rows + steps - 1) / steps;
    int panel = max(at->first[0] - first, 0) / PANEL_TOKENS;
    steps -= panel * now->groups;
    for (; panel * PANEL_TOKENS < tokens; panel++) {
        int token = first + panel * PANEL_TOKENS;
        unit_pointer unit[PANEL_UNITS];
        find_units(k, k_view, table, now, at->first[0], token, min(units_of(first + tokens - token), PANEL_UNITS), 0,
                   STAGED_K(at), unit);
        for (int group = 0; group < now->groups; group++) {
            int units = units_of(seen_by_group(at, group, token));
            for (int i = 0, row = next->rows - steps * share; i < share; i++)
                if (row + i >= 0)
                    prefetch_row(q, q_view, next, row + i);
            steps--;
            if (units > 0 && at->first[group * ROWS] < token + PANEL_TOKENS)
                score_group(at, group, unit, units,
                            at->scores + group * ROWS * TILE_UNITS + panel * PANEL_UNITS);
        }
    }
}

inline void softmax_tile(const tile *now, int first, state *at)
{
    for (int group = 0; group < now->groups; group++) {
        int units = (min(units_of(seen_by_group(at, group, first)), TILE_UNITS) + 1) / 2 * 2;
        for (int r = group * ROWS; units > 0 && r < (group + 1) * ROWS; r++) {
            int head = now->kv_head * GROUP + now->head + r % now->heads;
            change_scores(at->scores + r * TILE_UNITS, units, head, first, at->visible[r] - 1);
            softmax_row(r, at->first[r] - first, at->visible[r] - first, units, at);
        }
    }
}

inline void attend_tile(__global const KV_ELEM *v, long4 v_view, __global const int *table, const tile *now, int first,
                        int tokens, state *at, const outputs *to)
{
    unit_pointer unit[TILE_UNITS];
    find_units(v, v_view, table, now, at->first[0], first, units_of(tokens), 1, STAGED_V(at), unit);
    for (int part = 0; part < PARTS; part++) {
        for (int group = 0; group < now->groups; group++) {
            if (seen_by_group(at, group, first) <= 0)
                continue;
            int vector = part * PART_VECTORS, width = part < FULL_PARTS ? PART_VECTORS : LAST_VECTORS;
#if !WIDE_REGISTERS
            for (int i = 0; i < width; i++)
                attend_group(now, group, vector + i, 1, width, unit, first, at, to);
#else
            if (width == PART_VECTORS)
                attend_group(now, group, vector, PART_VECTORS, PART_VECTORS, unit, first, at, to);
            else
                attend_group(now, group, vector, LAST_VECTORS, LAST_VECTORS, unit, first, at, to);
#endif
        }
    }
}

/* Writes the row groups that see no key at all. */
inline void store_blind(const tile *now, const state *at, const outputs *to)
{
    float16 zero[ROWS][PART_VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        zero[r][0] = (float16)(0.0f);
    for (int group = 0; group < now->groups && seen_by_group(at, group, 0) <= 0; group++)
        for (int vector = 0; vector < VECTORS; vector++)
            store_rows(now, group, vector, 1, zero, at, to);
}

/* Whether every row of out starts at a vector. */
inline bool can_stream(__global const OUT_ELEM *out, long4 view)
{
    return ((size_t)(out + view.s0) % sizeof(float16)) == 0 && view.s1 % LANES == 0 && view.s2 % LANES == 0;
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
kvl_prefill(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
            long4 v_view, __global const int *table, __global int *meta, __global OUT_ELEM *out, long4 out_view,
            __global float *lse, long4 lse_view, int4 shape, int4 work, float scale_log2, int4 work2)
{
    state at;
    outputs to = {out, out_view, lse, lse_view, can_stream(out, out_view)};
    __global const int *claims = meta + work2.s0;
    __global int *counter = meta;
    int claim = take_work(counter);
    int index = claim < work2.s1 ? claims[claim] : work.s2, end = claim < work2.s1 ? claims[claim + 1] : work.s2;
    while (index < work.s2) {
        int following = index + 1;
        if (following >= end) {
            claim = take_work(counter);
            following = claim < work2.s1 ? claims[claim] : work.s2;
            end = claim < work2.s1 ? claims[claim + 1] : work.s2;
        }
        tile now = find_tile(meta, work, work2, index);
        tile next = find_tile(meta, work, work2, min(following, work.s2 - 1));
        if (following >= work.s2)
            next.rows = 0;
        load_rows(q, q_view, &now, scale_log2, &at);
        store_blind(&now, &at, &to);
        int keys = seen_by_group(&at, now.groups - 1, 0);
        for (int first = at.first[0] / TILE_TOKENS * TILE_TOKENS; first < keys; first += TILE_TOKENS) {
            score_tile(k, k_view, table, &now, first, min(keys - first, TILE_TOKENS), &at, q, q_view, &next);
            softmax_tile(&now, first, &at);
            attend_tile(v, v_view, table, &now, first, min(keys - first, TILE_TOKENS), &at, &to);
        }
        index = following;
    }
    finish_work(counter);
}
