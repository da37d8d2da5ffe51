// SPDX-License-Identifier: Apache-2.0
#line 1 "cl_kernels/portable/prefill.cl"
/* Prefill on any device: online softmax over tiles of keys at fixed positions, the scores in local memory alone.
 *
 * A work-group takes a tile of rows (queries times heads of one KV head). A work-item holds octets of rows as float8,
 * so that one element of K or V from local memory serves eight rows: four keys at a time in the scores, four dims at a
 * time in the values. What a row adds up, and in which order, depends on its own keys only. */
#include "common/config.clh"
#include "common/dtypes.clh"
#include "common/layout.clh"
#include "common/masks.clh"
#include "common/octet.clh"
#include "common/softmax.clh"

/* Functions here are `inline` and never `static`: PoCL takes a local array that static functions alone see for one that
 * a barrier leaves as it is, and moves reads across. */

#if TILE_ROWS < 8 || TILE_ROWS > 64 || WORK_GROUP > 256
#error "local memory is laid out for tiles of 8 to 64 rows and work-groups of up to 256"
#endif

#define ROW_OCTETS (TILE_ROWS / 8)
/* Work-items side by side over the keys or dims of an octet of rows, and octets of rows a work-item holds. */
#define LANES (WORK_GROUP > ROW_OCTETS ? WORK_GROUP / ROW_OCTETS : 1)
#define OWN_OCTETS (WORK_GROUP < ROW_OCTETS ? ROW_OCTETS / WORK_GROUP : 1)

/* Keys of a tile: a constant of the family, it decides the bits of the result. */
#define KEY_TILE 64
#define KEY_QUADS ((KEY_TILE / 4 + LANES - 1) / LANES)
#define DIM_QUADS ((DIM_CAPACITY / 4 + LANES - 1) / LANES)
/* Dims of q and K in local memory at once; their room is that of the weights. */
#define STAGE_DIMS 32
/* Keys whose values are in local memory at once: 8 KiB for any head_dim. */
#if DIM_CAPACITY <= 32
#define STAGE_KEYS 64
#elif DIM_CAPACITY <= 64
#define STAGE_KEYS 32
#elif DIM_CAPACITY <= 128
#define STAGE_KEYS 16
#else
#define STAGE_KEYS 8
#endif
/* Dims of the output in local memory at once, where the weights were. */
#define OUTPUT_DIMS KEY_TILE
#define STAGE_FLOATS (STAGE_DIMS * (TILE_ROWS + KEY_TILE))
#define WEIGHT_FLOATS (KEY_TILE * TILE_ROWS)
/* What keeps the accumulators in registers, where there are few enough of them. */
#if OWN_OCTETS * DIM_QUADS <= 4
#define UNROLL _Pragma("unroll")
#define UNROLL_TWICE _Pragma("unroll 2")
#else
#define UNROLL
#define UNROLL_TWICE
#endif
/* Work-items that share a row in the softmax. */
#define ROW_PARTS (WORK_GROUP > TILE_ROWS ? WORK_GROUP / TILE_ROWS : 1)

/* The weight of a hidden key in a tile where some row has one; its value is then not added. */
#define HIDDEN (-1.0f)

/* The tile of rows and its sequence. */
typedef struct {
    int first_last, final_last; /* last key that its first and its final query see */
    int first_first, final_first; /* first key of both */
    int kv_len, table_first, num_blocks, kv_head, first_head;
    int block_size, head_dim;
} row_tile;

/* The keys of a tile: where they lie; token -1 where there is none, no row sees it or its block is bad. */
typedef struct {
    long k, v;
    int token;
} key_place;

inline void find_keys(__global const int *table, const row_tile *t, long4 k_view, long4 v_view, int first_key,
                      __local key_place *keys)
{
    for (int i = (int)get_local_id(0); i < KEY_TILE; i += WORK_GROUP) {
        int key = first_key + i;
        keys[i].token = -1;
        if (key >= t->first_first && key < t->kv_len) {
            int block = BLOCK_OF(key, t->block_size);
            long v_tile = find_tile(table, t->table_first, block, t->num_blocks, v_view, t->kv_head);
            if (v_tile >= 0) {
                keys[i].k = find_tile(table, t->table_first, block, t->num_blocks, k_view, t->kv_head);
                keys[i].v = v_tile;
                keys[i].token = TOKEN_OF(key, t->block_size);
            }
        }
    }
}

/* Dims first_dim .. + STAGE_DIMS - 1 of the rows' queries, scaled, as [dim][row]; zero where there is none. */
inline void stage_query(__global const Q_ELEM *q, __local const long *row_starts, int first_dim, int head_dim,
                        float scale_log2, __local float *out)
{
    for (int i = (int)get_local_id(0); i < TILE_ROWS * (STAGE_DIMS / 8); i += WORK_GROUP) {
        int row = i % TILE_ROWS, dim = i / TILE_ROWS * 8;
        long start = row_starts[row];
        for (int d = 0; d < 8; d++) {
            float x = 0.0f;
            if (start >= 0 && first_dim + dim + d < head_dim)
                x = LOAD_Q(q, start + first_dim + dim + d) * scale_log2;
            out[(dim + d) * TILE_ROWS + row] = x;
        }
    }
}

/* The same of the keys, as [dim][key]. */
inline void stage_keys(__global const KV_ELEM *k, long4 view, const row_tile *t, __local const key_place *keys,
                       int first_dim, __local float *out)
{
    for (int i = (int)get_local_id(0); i < KEY_TILE * (STAGE_DIMS / 8); i += WORK_GROUP) {
        int key = i % KEY_TILE, dim = i / KEY_TILE * 8;
        octet x = OCTET_ZERO;
        if (keys[key].token >= 0 && first_dim + dim < t->head_dim)
            x = read_octet(k, keys[key].k + element_offset(view, 0, t->block_size, t->head_dim, keys[key].token,
                                                           first_dim + dim),
                           OCTET_STEP(0), t->head_dim - first_dim - dim);
        float8 wide = widen_octet(x);
        __local float *column = out + dim * KEY_TILE + key;
        column[0] = wide.s0;
        column[KEY_TILE] = wide.s1;
        column[2 * KEY_TILE] = wide.s2;
        column[3 * KEY_TILE] = wide.s3;
        column[4 * KEY_TILE] = wide.s4;
        column[5 * KEY_TILE] = wide.s5;
        column[6 * KEY_TILE] = wide.s6;
        column[7 * KEY_TILE] = wide.s7;
    }
}

/* The values of STAGE_KEYS keys from first_key of the tile, as [key][dim]. */
inline void stage_values(__global const KV_ELEM *v, long4 view, const row_tile *t, __local const key_place *keys,
                         int first_key, __local float4 *out)
{
    int octets = (t->head_dim + 7) / 8;
    for (int i = (int)get_local_id(0); i < STAGE_KEYS * octets; i += WORK_GROUP) {
        int key = i / octets, index = i % octets;
        __local const key_place *place = keys + first_key + key;
        octet x = OCTET_ZERO;
        if (place->token >= 0)
            x = read_octet(v, place->v + element_offset(view, 1, t->block_size, t->head_dim, place->token, index * 8),
                           OCTET_STEP(1), t->head_dim - index * 8);
        float8 wide = widen_octet(x);
        out[key * (DIM_CAPACITY / 4) + index * 2] = wide.lo;
        out[key * (DIM_CAPACITY / 4) + index * 2 + 1] = wide.hi;
    }
}

/* sums[octet][quad][key] += q . k over the staged dims. */
inline void multiply_stage(float8 (*sums)[KEY_QUADS][4], __local const float *query, __local const float *keys,
                           int dims)
{
    int lane = (int)get_local_id(0) % LANES, octet_index = (int)get_local_id(0) / LANES;
    if (lane >= KEY_TILE / 4)
        return;
    UNROLL_TWICE
    for (int d = 0; d < dims; d++) {
UNROLL
        for (int i = 0; i < OWN_OCTETS; i++) {
            float8 rows = *(__local const float8 *)(query + d * TILE_ROWS + (octet_index + i * WORK_GROUP) * 8);
UNROLL
            for (int j = 0; j < KEY_QUADS; j++) {
                float4 four = *(__local const float4 *)(keys + d * KEY_TILE + (lane + j * LANES) * 4);
                sums[i][j][0] = fma(rows, (float8)(four.s0), sums[i][j][0]);
                sums[i][j][1] = fma(rows, (float8)(four.s1), sums[i][j][1]);
                sums[i][j][2] = fma(rows, (float8)(four.s2), sums[i][j][2]);
                sums[i][j][3] = fma(rows, (float8)(four.s3), sums[i][j][3]);
            }
        }
    }
}

/* Writes the products as [key][row]. */
inline void store_products(float8 (*sums)[KEY_QUADS][4], __local float *products)
{
    int lane = (int)get_local_id(0) % LANES, octet_index = (int)get_local_id(0) / LANES;
    if (lane >= KEY_TILE / 4)
        return;
    UNROLL
    for (int i = 0; i < OWN_OCTETS; i++) {
        __local float *rows = products + (octet_index + i * WORK_GROUP) * 8;
        UNROLL
        for (int j = 0; j < KEY_QUADS * 4; j++)
            *(__local float8 *)(rows + ((lane + j / 4 * LANES) * 4 + j % 4) * TILE_ROWS) = sums[i][j / 4][j % 4];
    }
}

/* Turns products into scores, NEGATIVE where hidden, and finds the rows' maxima over the keys of each part, as
 * [part][row]. */
inline void mask_scores(__local float *scores, const row_tile *t, __local const key_place *keys, int first_key,
                        __local const int *row_first, __local const int *row_last, __local const int *row_head,
                        __local float *maxima)
{
    for (int i = (int)get_local_id(0); i < TILE_ROWS * ROW_PARTS; i += WORK_GROUP) {
        int row = i % TILE_ROWS, head = t->first_head + row_head[row];
        int first = row_first[row], last = row_last[row];
        float maximum = NEGATIVE;
        for (int key = i / TILE_ROWS; key < KEY_TILE; key += ROW_PARTS) {
            float s = NEGATIVE;
            if (keys[key].token >= 0 && visible(first_key + key, first, last))
                s = score(scores[key * TILE_ROWS + row], head, first_key + key, last);
            scores[key * TILE_ROWS + row] = s;
            maximum = fmax(maximum, s);
        }
        maxima[i] = maximum;
    }
}

/* The running maximum m of a row with those of this tile. */
inline float join_maxima(float m, __local const float *maxima, int row)
{
    for (int part = 0; part < ROW_PARTS; part++)
        m = fmax(m, maxima[part * TILE_ROWS + row]);
    return m;
}

/* Turns scores into weights; their sums as [part][row]. `hidden` is the weight that hidden keys are given. */
inline void weigh_rows(__local float *scores, __local const float *row_m, __local const float *maxima,
                       __local float *part_sums, float hidden)
{
    for (int i = (int)get_local_id(0); i < TILE_ROWS * ROW_PARTS; i += WORK_GROUP) {
        int row = i % TILE_ROWS;
        float m = join_maxima(row_m[row], maxima, row), sum = 0.0f;
        for (int key = i / TILE_ROWS; key < KEY_TILE; key += ROW_PARTS) {
            float s = scores[key * TILE_ROWS + row];
            float weight = weigh(s, m);
            sum += weight;
            scores[key * TILE_ROWS + row] = s == NEGATIVE ? hidden : weight;
        }
        part_sums[i] = sum;
    }
}

/* Moves the rows' running maximum and sum on; row_factor = what their accumulators are rescaled by. */
inline void update_rows(__local float *row_m, __local float *row_l, __local float *row_factor,
                        __local const float *maxima, __local const float *part_sums)
{
    for (int row = (int)get_local_id(0); row < TILE_ROWS; row += WORK_GROUP) {
        float m = join_maxima(row_m[row], maxima, row), sum = part_sums[row];
        for (int part = 1; part < ROW_PARTS; part++)
            sum += part_sums[part * TILE_ROWS + row];
        float factor = exp2(row_m[row] - m);
        row_l[row] = fma(row_l[row], factor, sum);
        row_m[row] = m;
        row_factor[row] = factor;
    }
}

inline void rescale(float8 (*sums)[DIM_QUADS][4], __local const float *row_factor)
{
    int octet_index = (int)get_local_id(0) / LANES;
    UNROLL
    for (int i = 0; i < OWN_OCTETS; i++) {
        float8 factor = *(__local const float8 *)(row_factor + (octet_index + i * WORK_GROUP) * 8);
        UNROLL
        for (int j = 0; j < DIM_QUADS * 4; j++)
            sums[i][j / 4][j % 4] *= factor;
    }
}

/* sums[octet][quad][dim] += weight * value of one key. Where not every row sees every key of the tile (`whole` is 0),
 * what a row does not see is left out, whatever it holds. */
inline void add_key(float8 (*sums)[DIM_QUADS][4], __local const float *weights, __local const float4 *values,
                    int head_dim, int whole)
{
    int lane = (int)get_local_id(0) % LANES, octet_index = (int)get_local_id(0) / LANES;
    UNROLL
    for (int i = 0; i < OWN_OCTETS; i++) {
        float8 rows = *(__local const float8 *)(weights + (octet_index + i * WORK_GROUP) * 8);
        UNROLL
        for (int j = 0; j < DIM_QUADS; j++) {
            int quad = lane + j * LANES;
            if (quad * 4 >= head_dim)
                continue;
            float4 four = values[quad];
            float8 sum0 = fma(rows, (float8)(four.s0), sums[i][j][0]);
            float8 sum1 = fma(rows, (float8)(four.s1), sums[i][j][1]);
            float8 sum2 = fma(rows, (float8)(four.s2), sums[i][j][2]);
            float8 sum3 = fma(rows, (float8)(four.s3), sums[i][j][3]);
            if (!whole) {
                int8 hidden = rows < (float8)(0.0f);
                sum0 = select(sum0, sums[i][j][0], hidden);
                sum1 = select(sum1, sums[i][j][1], hidden);
                sum2 = select(sum2, sums[i][j][2], hidden);
                sum3 = select(sum3, sums[i][j][3], hidden);
            }
            sums[i][j][0] = sum0;
            sums[i][j][1] = sum1;
            sums[i][j][2] = sum2;
            sums[i][j][3] = sum3;
        }
    }
}

inline void add_stage(float8 (*sums)[DIM_QUADS][4], __local const float *weights, __local const float4 *values,
                      int head_dim, int whole)
{
    UNROLL_TWICE
    for (int key = 0; key < STAGE_KEYS; key++) {
        if (whole)
            add_key(sums, weights + key * TILE_ROWS, values + key * (DIM_CAPACITY / 4), head_dim, 1);
        else
            add_key(sums, weights + key * TILE_ROWS, values + key * (DIM_CAPACITY / 4), head_dim, 0);
    }
}

/* Four dims of one row of an octet. */
#define STAGE_ROW(R)                                                                                                   \
    stage[((octet_index + i * WORK_GROUP) * 8 + R) * (OUTPUT_DIMS / 4) + quad - first_dim / 4] =                       \
        (float4)(sums[i][j][0].s##R, sums[i][j][1].s##R, sums[i][j][2].s##R, sums[i][j][3].s##R);

/* Writes the rows' outputs, by way of local memory so that neighbours write neighbouring dims. */
inline void store_output(float8 (*sums)[DIM_QUADS][4], __local float4 *stage, __local const long *out_starts,
                         __local const float *row_l, __global OUT_ELEM *out, int head_dim)
{
    int id = (int)get_local_id(0), lane = id % LANES, octet_index = id / LANES;
    for (int first_dim = 0; first_dim < head_dim; first_dim += OUTPUT_DIMS) {
        barrier(CLK_LOCAL_MEM_FENCE);
        UNROLL
        for (int i = 0; i < OWN_OCTETS; i++) {
            UNROLL
            for (int j = 0; j < DIM_QUADS; j++) {
                int quad = lane + j * LANES;
                if (quad * 4 < first_dim || quad * 4 >= first_dim + OUTPUT_DIMS)
                    continue;
                STAGE_ROW(0) STAGE_ROW(1) STAGE_ROW(2) STAGE_ROW(3)
                STAGE_ROW(4) STAGE_ROW(5) STAGE_ROW(6) STAGE_ROW(7)
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = id; i < TILE_ROWS * OUTPUT_DIMS; i += WORK_GROUP) {
            int row = i / OUTPUT_DIMS, dim = first_dim + i % OUTPUT_DIMS;
            if (out_starts[row] >= 0 && dim < head_dim)
                STORE_OUT(normalise(((__local const float *)stage)[i], row_l[row]), out, out_starts[row] + dim);
        }
    }
}

/* The tile of an item, from the sequence's entry. */
inline row_tile make_tile(__global const int *entry, __global const int *item, int num_blocks, int group,
                          int block_size, int head_dim)
{
    row_tile t;
    t.kv_len = entry[ENTRY_KV_LEN];
    t.table_first = entry[ENTRY_TABLE];
    t.num_blocks = num_blocks;
    t.kv_head = item[ITEM_KV_HEAD];
    t.first_head = t.kv_head * group + item[ITEM_HEAD];
    t.block_size = block_size;
    t.head_dim = head_dim;
    int position = item[ITEM_QUERY] + t.kv_len - entry[ENTRY_Q_LEN];
    t.first_first = find_first(entry, position);
    t.first_last = find_last(entry, position);
    t.final_first = find_first(entry, position + item[ITEM_QUERIES] - 1);
    t.final_last = find_last(entry, position + item[ITEM_QUERIES] - 1);
    return t;
}

/* Offsets of the tile's rows in q or out, -1 where it has none: row r is query r / tile_heads of the tile and head
 * r % tile_heads of it. */
inline void place_rows(__local long *starts, long4 view, __global const int *entry, __global const int *item,
                       int tile_heads, int group, int first_head)
{
    for (int row = (int)get_local_id(0); row < TILE_ROWS; row += WORK_GROUP) {
        int query = row / tile_heads, head = row % tile_heads;
        bool there = query < item[ITEM_QUERIES] && item[ITEM_HEAD] + head < group;
        long token = (long)entry[ENTRY_Q_START] + item[ITEM_QUERY] + query;
        starts[row] = there ? view.s0 + token * view.s1 + (first_head + head) * view.s2 : -1;
    }
}

/* Scores of the tile's rows and the keys placed, still in the work-items that computed them. */
inline void score_keys(float8 (*sums)[KEY_QUADS][4], __global const Q_ELEM *q, __global const KV_ELEM *k,
                       long4 k_view, const row_tile *t, __local const long *row_starts,
                       __local const key_place *keys, float scale_log2, __local float *stage)
{
    for (int i = 0; i < OWN_OCTETS; i++)
        for (int j = 0; j < KEY_QUADS * 4; j++)
            sums[i][j / 4][j % 4] = (float8)(0.0f);
    for (int dim = 0; dim < t->head_dim; dim += STAGE_DIMS) {
        barrier(CLK_LOCAL_MEM_FENCE);
        stage_query(q, row_starts, dim, t->head_dim, scale_log2, stage);
        stage_keys(k, k_view, t, keys, dim, stage + STAGE_DIMS * TILE_ROWS);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_stage(sums, stage, stage + STAGE_DIMS * TILE_ROWS, min(STAGE_DIMS, t->head_dim - dim));
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) void
kvl_prefill(__global const Q_ELEM *q, long4 q_view, __global const KV_ELEM *k, long4 k_view, __global const KV_ELEM *v,
            long4 v_view, __global const int *table, __global const int *meta, __global OUT_ELEM *out, long4 out_view,
            __global float *lse, long4 lse_view, int4 shape, int4 work, float scale_log2, int4 work2)
{
    __local float8 shared[(STAGE_FLOATS > WEIGHT_FLOATS ? STAGE_FLOATS : WEIGHT_FLOATS) / 8], factors[ROW_OCTETS];
    __local float4 values[STAGE_KEYS * DIM_CAPACITY / 4];
    __local float row_m[TILE_ROWS], row_l[TILE_ROWS], maxima[TILE_ROWS * ROW_PARTS], part_sums[TILE_ROWS * ROW_PARTS];
    __local int row_first[TILE_ROWS], row_last[TILE_ROWS], row_head[TILE_ROWS];
    __local long row_starts[TILE_ROWS];
    __local key_place keys[KEY_TILE];
    __local float *stage = (__local float *)shared, *row_factor = (__local float *)factors;

    __global const int *item = meta + work.s1 + (int)get_group_id(0) * ITEM_INTS;
    __global const int *entry = meta + work.s0 + item[ITEM_ENTRY] * ENTRY_INTS;
    int group = SHAPE_GROUP(shape), tile_heads = work2.s2;
    row_tile t = make_tile(entry, item, work.s3, group, SHAPE_BLOCK_SIZE(shape), SHAPE_HEAD_DIM(shape));
    place_rows(row_starts, q_view, entry, item, tile_heads, group, t.first_head);
    int position = item[ITEM_QUERY] + t.kv_len - entry[ENTRY_Q_LEN];
    for (int row = (int)get_local_id(0); row < TILE_ROWS; row += WORK_GROUP) {
        row_first[row] = find_first(entry, position + row / tile_heads);
        row_last[row] = row_starts[row] < 0 ? -1 : min(t.first_last + row / tile_heads, t.final_last);
        row_head[row] = row % tile_heads;
        row_m[row] = NEGATIVE;
        row_l[row] = 0.0f;
    }
    float8 sums[OWN_OCTETS][DIM_QUADS][4];
    for (int i = 0; i < OWN_OCTETS; i++)
        for (int j = 0; j < DIM_QUADS * 4; j++)
            sums[i][j / 4][j % 4] = (float8)(0.0f);

    /* Counted from 0: PoCL loses what a loop with barriers stores if its counter begins elsewhere. */
    int start = t.first_first / KEY_TILE * KEY_TILE;
    for (int from_start = 0; from_start <= t.final_last - start; from_start += KEY_TILE) {
        int first_key = start + from_start;
        float8 scores[OWN_OCTETS][KEY_QUADS][4];
        int whole = all_visible(first_key, first_key + KEY_TILE - 1, t.first_last, t.final_first);
        find_keys(table, &t, k_view, v_view, first_key, keys);
        score_keys(scores, q, k, k_view, &t, row_starts, keys, scale_log2, stage);
        store_products(scores, stage);
        barrier(CLK_LOCAL_MEM_FENCE);
        mask_scores(stage, &t, keys, first_key, row_first, row_last, row_head, maxima);
        barrier(CLK_LOCAL_MEM_FENCE);
        weigh_rows(stage, row_m, maxima, part_sums, whole ? 0.0f : HIDDEN);
        barrier(CLK_LOCAL_MEM_FENCE);
        update_rows(row_m, row_l, row_factor, maxima, part_sums);
        for (int key = 0; key < KEY_TILE && first_key + key <= t.final_last; key += STAGE_KEYS) {
            stage_values(v, v_view, &t, keys, key, values);
            barrier(CLK_LOCAL_MEM_FENCE);
            if (key == 0)
                rescale(sums, row_factor);
            add_stage(sums, stage + key * TILE_ROWS, values, t.head_dim, whole);
            barrier(CLK_LOCAL_MEM_FENCE);
        }
    }

    barrier(CLK_LOCAL_MEM_FENCE);
    for (int row = (int)get_local_id(0); row < TILE_ROWS; row += WORK_GROUP) {
        long token = (long)entry[ENTRY_Q_START] + item[ITEM_QUERY] + row / tile_heads;
        if (row_starts[row] >= 0 && lse_view.s3)
            lse[lse_view.s0 + token * lse_view.s1 + (t.first_head + row_head[row]) * lse_view.s2] =
                natural_lse(row_m[row], row_l[row]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    place_rows(row_starts, out_view, entry, item, tile_heads, group, t.first_head);
    store_output(sums, (__local float4 *)shared, row_starts, row_l, out, t.head_dim);
}
