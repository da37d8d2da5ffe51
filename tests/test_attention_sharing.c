/* SPDX-License-Identifier: Apache-2.0 */
/* Protects shared splits in decode: rows are grouped by what their block tables have in common and by nothing else,
 * each split of each row is computed once, and the bits are those of a row alone. */
#include "support.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "attention/state.h"
#include "common/plan.h"
#include "problem.h"

enum { MAX_SEQS = 40, COLUMNS = 24, TOKENS = 8 };

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof((array)[0])))

static kvleaf_device *device;
static cl_command_queue queue;
static support_rng rng;

static int set_up(void **state)
{
    (void)state;
    rng.state = support_seed(20261129);
    device = support_device();
    queue = support_queue(device);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    clReleaseCommandQueue(queue);
    kvleaf_device_destroy(&device);
    return 0;
}

/* Host only: the schedule of made-up tables. */

static int32_t pairs = 7;

static int32_t some_pairs(const kvl_geometry *geometry)
{
    (void)geometry;
    return pairs;
}

static const kvl_variant sharing_variant = {
    .family = "decode", .name = "made up", .split_tokens = TOKENS, .shared_pairs = some_pairs, .share_from = 3};

typedef struct scene {
    kvl_engine engine;
    kvl_step_seq seqs[MAX_SEQS];
    int32_t tables[MAX_SEQS][COLUMNS * TOKENS];
    int32_t num_seqs;
    int32_t meta[1 << 16];
    kvl_schedule at;
} scene;

/* Tables as forks and prefix hits leave them: each sequence goes with an earlier one for a while. */
static void draw_scene(scene *s, int32_t block_size, int32_t kv_heads, kvleaf_sharing sharing)
{
    int32_t next = 0, rows = MAX_SEQS * 3, capacity = rows * COLUMNS;
    memset(s, 0, sizeof(*s));
    s->num_seqs = support_range(&rng, 1, MAX_SEQS);
    for (int32_t i = 0; i < s->num_seqs; i++) {
        int32_t keys = support_range(&rng, 0, COLUMNS * TOKENS), blocks = (keys + block_size - 1) / block_size;
        int32_t parent = i ? support_range(&rng, 0, i - 1) : 0;
        int32_t kept = i && support_range(&rng, 0, 3) ? support_range(&rng, 0, blocks) : 0;
        int32_t there = (s->seqs[parent].kv_len + block_size - 1) / block_size;
        for (int32_t c = 0; c < blocks; c++)
            s->tables[i][c] = c < kept && c < there ? s->tables[parent][c] : next++;
        s->seqs[i] = (kvl_step_seq){.q_len = support_range(&rng, 0, 9) ? 1 : support_range(&rng, 0, 3),
                                    .kv_len = keys,
                                    .table = i * COLUMNS * TOKENS,
                                    .family = KVLEAF_FAMILY_DECODE,
                                    .blocks = s->tables[i]};
    }
    s->engine.device = device;
    s->engine.chosen[KVL_DECODE].variant = &sharing_variant;
    s->engine.params = (kvl_engine_params){.sharing = sharing};
    s->engine.params.geometry = (kvl_geometry){.num_kv_heads = kv_heads, .block_size = block_size};
    s->engine.capacity.rows = rows;
    s->engine.capacity.splits = capacity;
    s->engine.rows = calloc((size_t)rows, sizeof(kvl_row));
    s->engine.row_order = calloc((size_t)rows, sizeof(int32_t));
    s->engine.shared = calloc((size_t)rows, sizeof(int32_t));
    s->engine.keys = calloc((size_t)rows, sizeof(int32_t));
    s->engine.buckets = calloc((size_t)rows, 4 * sizeof(int32_t));
}

static void free_scene(scene *s)
{
    free(s->engine.rows);
    free(s->engine.row_order);
    free(s->engine.shared);
    free(s->engine.keys);
    free(s->engine.buckets);
}

/* Splits that two rows have in the same blocks, from the first on. */
static int32_t in_common(const scene *s, const kvl_row *a, const kvl_row *b)
{
    int32_t shorter = a->end < b->end ? a->end : b->end, block_size = s->engine.params.geometry.block_size, split = 0;
    for (; (split + 1) * TOKENS <= shorter; split++)
        for (int32_t token = split * TOKENS; token < (split + 1) * TOKENS; token++)
            if (a->blocks[token / block_size] != b->blocks[token / block_size])
                return split;
    return split;
}

/* All rows that have splits in common form runs of neighbours. */
static void check_order(const scene *s)
{
    int32_t n = s->at.num_rows;
    for (int32_t i = 0; i < n; i++) {
        const kvl_row *a = &s->engine.rows[s->engine.row_order[i]];
        int32_t least = INT_MAX;
        for (int32_t k = i + 1; k < n; k++) {
            const kvl_row *b = &s->engine.rows[s->engine.row_order[k]];
            int32_t shared = s->engine.shared[k - 1];
            least = shared < least ? shared : least;
            assert_int_equal(least, in_common(s, a, b));
        }
    }
}

/* Every (row, split, KV head) is in one piece, and the rows of a piece have its split in common. */
static void check_pieces(const scene *s, int32_t from)
{
    static uint8_t seen[MAX_SEQS * 3][COLUMNS + 1][8];
    int32_t heads = s->engine.params.geometry.num_kv_heads, splits = 0;
    memset(seen, 0, sizeof(seen));
    for (int32_t i = 0; i < s->at.num_splits; i++) {
        const int32_t *item = s->meta + s->at.splits_at + i * SPLIT_INTS;
        int32_t first = item[SPLIT_ROW], rows = item[SPLIT_ROWS], split = item[SPLIT_INDEX];
        assert_in_range(rows, 1, s->at.num_rows - first);
        assert_true(rows == 1 || (rows >= from && rows * item[SPLIT_KV_HEADS] <= pairs));
        for (int32_t row = first; row < first + rows; row++) {
            const kvl_row *a = &s->engine.rows[s->engine.row_order[first]];
            const kvl_row *b = &s->engine.rows[s->engine.row_order[row]];
            assert_true(row == first || in_common(s, a, b) > split);
            for (int32_t head = 0; head < item[SPLIT_KV_HEADS]; head++)
                seen[row][split][item[SPLIT_KV_HEAD] + head]++;
        }
    }
    for (int32_t i = 0; i < s->at.num_rows; i++) {
        const kvl_row *row = &s->engine.rows[s->engine.row_order[i]];
        const int32_t *stored = s->meta + s->at.rows_at + i * ROW_INTS;
        assert_int_equal(stored[ROW_Q_TOKEN], row->q_token);
        assert_int_equal(stored[ROW_VISIBLE], row->end);
        assert_int_equal(stored[ROW_PARTIAL], splits);
        splits += row->splits;
        for (int32_t split = 0; split <= COLUMNS; split++)
            for (int32_t head = 0; head < 8; head++)
                assert_int_equal(seen[i][split][head], split < row->splits && head < heads);
    }
    assert_true(s->at.num_splits <= splits);
}

static void test_rows_are_grouped_by_their_blocks(void **state)
{
    static scene s;
    static const int32_t block_sizes[] = {1, 2, 3, 4, 8, 16};
    int32_t pieces[3] = {0, 0, 0};
    (void)state;
    for (int32_t round = 0; round < 600; round++) {
        kvleaf_sharing sharing = (kvleaf_sharing)(round % 3);
        pairs = support_range(&rng, 1, 20);
        draw_scene(&s, block_sizes[round % COUNT(block_sizes)], support_range(&rng, 1, 8), sharing);
        int64_t splits = 0;
        const kvl_step step = {.seqs = s.seqs, .num_seqs = s.num_seqs, .num_blocks = INT_MAX};
        assert_true(kvl_rows_collect(&s.engine, &step, &s.at, &splits));
        kvl_rows_order(&s.engine, s.at.num_rows);
        s.at.splits_at = ROW_INTS * s.at.num_rows;
        kvl_rows_write(&s.engine, &step, s.meta, &s.at, NULL);
        if (sharing == KVLEAF_SHARING_ALWAYS && pairs >= 2)
            check_order(&s);
        check_pieces(&s, sharing == KVLEAF_SHARING_AUTO ? sharing_variant.share_from : 2);
        if (sharing == KVLEAF_SHARING_OFF)
            assert_int_equal(s.at.num_splits, splits);
        pieces[sharing] += (int32_t)splits - s.at.num_splits;
        free_scene(&s);
    }
    assert_true(pieces[KVLEAF_SHARING_AUTO] > 0 && pieces[KVLEAF_SHARING_ALWAYS] > pieces[KVLEAF_SHARING_AUTO]);
}

/* On the device. */

static const problem_geometry geometries[] = {
    {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_NHD, KVLEAF_LAYOUT_STRIDED, 24, 2, 16, 16, 0, 0, 0, false},
    {KVLEAF_F16, KVLEAF_F16, KVLEAF_F32, PROBLEM_PACKED, KVLEAF_LAYOUT_CPU16, 4, 2, 80, 16, 0, 20, 0, false},
    {KVLEAF_F32, KVLEAF_F32, KVLEAF_F32, PROBLEM_NHD, KVLEAF_LAYOUT_STRIDED, 12, 2, 16, 5, 0, 0, 0, true},
};

static kvleaf_attention *make_attention(const problem_geometry *geometry, kvleaf_sharing sharing)
{
    kvleaf_attention_params params = problem_attention_params(geometry, MAX_SEQS, 64, 2048);
    kvleaf_attention *attention = NULL;
    params.sharing = sharing;
    ASSERT_OK(kvleaf_attention_create(device, &params, &attention));
    return attention;
}

/* Sequences 1 .. share their first blocks with one before them. */
static void share_blocks(problem *made, const int32_t *parents, const int32_t *tokens)
{
    for (int32_t i = 0; i < made->num_seqs; i++)
        memcpy(made->table + i * made->columns, made->table + parents[i] * made->columns,
               (size_t)(tokens[i] / made->geometry.block_size) * sizeof(int32_t));
}

/* Rows of one sequence alone, over the problem's arrays. */
static void attend_alone(problem *made, kvleaf_attention *attention, int32_t index)
{
    const int32_t queries[] = {0, made->seqs[index].q_len};
    kvleaf_batch batch = problem_batch(made);
    kvleaf_kv_view view = problem_kv_view(made);
    kvleaf_exec exec = problem_exec(made);
    kvleaf_tensor tensors[] = {problem_tensor(&made->q), problem_tensor(&made->out), problem_tensor(&made->lse)};
    const problem_array *arrays[] = {&made->q, &made->out, &made->lse};
    for (int i = 0; i < 3; i++)
        tensors[i].offset +=
            (uint64_t)(made->cu_q[index] * arrays[i]->token_stride) * (uint64_t)kvleaf_dtype_size(arrays[i]->dtype);
    batch.num_seqs = 1;
    batch.cu_seqlens_q = queries;
    batch.seq_lens_k = made->lens + index;
    batch.block_table = made->table + index * made->columns;
    batch.families = made->families + index;
    batch.masks = made->masks + index;
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    ASSERT_OK(kvleaf_attention_attend(attention, &tensors[0], &view, &tensors[1], &tensors[2], &exec));
    assert_int_equal(clFinish(queue), CL_SUCCESS);
}

static void test_bits_are_those_of_a_row_alone(void **state)
{
    /* Two trees and strangers, among them several rows of one sequence, prefill, and rows that see nothing. */
    static const struct {
        int32_t q_len, kv_len, parent, shared;
        kvleaf_family family;
    } rows[] = {{1, 1100, 0, 0, 2},    {1, 1090, 0, 1056, 2}, {1, 1040, 0, 1040, 2}, {1, 600, 1, 560, 2},
                {1, 1500, 1, 1056, 2}, {1, 1540, 4, 1480, 2}, {1, 515, 6, 0, 2},     {3, 1100, 0, 1056, 2},
                {1, 1100, 8, 0, 2},    {1, 1030, 8, 1024, 2}, {9, 700, 8, 640, 1},   {1, 512, 8, 512, 2},
                {1, 511, 8, 480, 2},   {2, 1, 13, 0, 2},      {1, 0, 14, 0, 2},      {1, 1099, 0, 1056, 2},
                {1, 1098, 0, 1056, 2}, {1, 1097, 0, 1056, 2}, {1, 1096, 0, 1056, 2}, {1, 1095, 0, 1056, 2},
                {1, 1094, 0, 1056, 2}, {1, 1093, 0, 1056, 2}, {1, 1092, 0, 1056, 2}, {1, 1091, 0, 1056, 2}};
    (void)state;
    for (int32_t g = 0; g < COUNT(geometries); g++) {
        static problem made;
        problem_seq seqs[COUNT(rows)];
        int32_t parents[COUNT(rows)], shared[COUNT(rows)], pieces[3];
        problem_report report;
        for (int32_t i = 0; i < COUNT(rows); i++) {
            seqs[i] = (problem_seq){
                .id = (uint32_t)i, .q_len = rows[i].q_len, .kv_len = rows[i].kv_len, .family = rows[i].family};
            parents[i] = rows[i].parent;
            shared[i] = rows[i].shared;
        }
        const problem_options options = {.seed = support_next(&rng), .placement = 6};
        if (!problem_create(&made, device, queue, &geometries[g], seqs, COUNT(rows), &options))
            fail_msg("%s", made.fault);
        share_blocks(&made, parents, shared);
        size_t bytes = (size_t)made.total_q * (size_t)(geometries[g].num_heads * geometries[g].head_dim) * 4;
        size_t lse_bytes = (size_t)(made.total_q * geometries[g].num_heads) * sizeof(float);
        unsigned char *out = malloc(bytes);
        float *lse = malloc(lse_bytes);
        assert_true(out && lse);
        for (int sharing = KVLEAF_SHARING_ALWAYS; sharing >= KVLEAF_SHARING_AUTO; sharing--) {
            kvleaf_attention *attention = make_attention(&geometries[g], (kvleaf_sharing)sharing);
            ASSERT_OK(problem_attend(&made, attention));
            if (!problem_verify(&made, &report))
                fail_msg("geometry %d, sharing %d: %s", g, sharing, report.text);
            pieces[sharing] = attention->engine->now.num_splits;
            if (sharing == KVLEAF_SHARING_ALWAYS) {
                memcpy(out, made.out_bits, bytes);
                memcpy(lse, made.lse_values, lse_bytes);
                assert_true(problem_upload_outputs(&made));
                for (int32_t i = COUNT(rows) - 1; i >= 0; i--)
                    attend_alone(&made, attention, i);
                assert_true(problem_collect(&made));
            }
            assert_memory_equal(out, made.out_bits, bytes);
            assert_memory_equal(lse, made.lse_values, lse_bytes);
            if (sharing == KVLEAF_SHARING_AUTO && attention->engine->chosen[KVL_DECODE].variant->shared_pairs)
                assert_true(pieces[KVLEAF_SHARING_ALWAYS] < pieces[KVLEAF_SHARING_OFF] &&
                            pieces[KVLEAF_SHARING_AUTO] < pieces[KVLEAF_SHARING_OFF]);
            kvleaf_attention_destroy(&attention);
        }
        free(out);
        free(lse);
        problem_destroy(&made);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_grouped_by_their_blocks),
        cmocka_unit_test(test_bits_are_those_of_a_row_alone),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
