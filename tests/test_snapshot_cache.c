/* SPDX-License-Identifier: Apache-2.0 */
/* A snapshot taken of one cache and loaded into another: every committed byte is there, in whatever layout and pool,
 * what was shared is shared, what the index found it finds, and a decoding step gives the same bits. */
#include <stdlib.h>
#include <string.h>

#include <kvleaf/snapshot.h>

#include "rig.h"

/* Two groups where blocks have 16 tokens, one elsewhere: each geometry is a program to build. */
static rig_params params_of(kvleaf_layout layout, kvleaf_dtype dtype, int32_t block_size, int32_t num_blocks)
{
    rig_params p = rig_defaults();
    p.layout = layout;
    p.kv_dtype = p.q_dtype = p.out_dtype = dtype;
    p.block_size = block_size;
    p.num_blocks = num_blocks;
    p.no_plan = true;
    if (block_size < 16)
        return p;
    p.num_layers = 3;
    p.layer_dim[1] = 12;
    p.kv_layer[2] = 1;
    return p;
}

/* Fills tokens as another cache exported them. */
static void fill(rig *r, rig_seq *seq, int32_t start, int32_t count)
{
    uint64_t size;
    uint8_t *bytes = rig_rows(r, seq, start, count, &size);
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    ASSERT_OK(kvleaf_seq_import(r->cache, seq->seq, start, count, bytes, size, &exec));
    seq->committed = seq->extended;
    free(bytes);
}

/* Extends by tokens of known ids, and fills them. */
static void add(rig *r, rig_seq *seq, int32_t first, int32_t count)
{
    int32_t tokens[256], start = seq->extended;
    for (int32_t i = 0; i < count; i++)
        tokens[i] = first + i;
    rig_extend_with(r, seq, tokens, count);
    fill(r, seq, start, count);
}

static kvleaf_status save(rig *r, const char *path, const kvleaf_seq *seqs, int32_t n, bool prefix_cache)
{
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    const kvleaf_snapshot_params params = {
        .struct_size = sizeof params, .seqs = seqs, .num_seqs = n, .prefix_cache = prefix_cache};
    return kvleaf_snapshot_save(r->cache, path, &params, &exec);
}

static kvleaf_status load(rig *r, const char *path, kvleaf_seq *seqs, int32_t capacity)
{
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    int32_t count = -1;
    kvleaf_status status = kvleaf_snapshot_load(r->cache, path, seqs, capacity, &count, &exec);
    if (!status)
        assert_in_range(count, 0, capacity);
    return status;
}

static kvleaf_snapshot_info inspect(const char *path)
{
    kvleaf_snapshot_info info = {.struct_size = sizeof info};
    ASSERT_OK(kvleaf_snapshot_inspect(path, &info));
    return info;
}

/* What was loaded, with the tokens that the model of another rig says it has. */
static rig_seq *adopt(rig *r, const rig_seq *from, kvleaf_seq seq)
{
    rig_seq *made = rig_seq_new(r);
    ASSERT_OK(kvleaf_seq_destroy(r->cache, &made->seq));
    *made = *from;
    made->seq = seq;
    made->extended = made->committed;
    rig_check_lengths(r, made, made->committed);
    return made;
}

static void test_between_layouts(void **state)
{
    (void)state;
    static const struct {
        kvleaf_layout from, to;
        kvleaf_dtype dtype;
        int32_t block_size, to_blocks;
    } cases[] = {
        {KVLEAF_LAYOUT_CPU16, KVLEAF_LAYOUT_ROWS, KVLEAF_F16, 16, 50},
        {KVLEAF_LAYOUT_ROWS, KVLEAF_LAYOUT_CPU16, KVLEAF_F16, 16, 10},
        {KVLEAF_LAYOUT_DIM8, KVLEAF_LAYOUT_SWIZZLE8, KVLEAF_BF16, 8, 16},
        {KVLEAF_LAYOUT_ROWS, KVLEAF_LAYOUT_ROWS, KVLEAF_F32, 5, 22},
    };
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig from, to;
        rig_params p = params_of(cases[i].from, cases[i].dtype, cases[i].block_size, 30);
        rig_open(&from, &p);
        p = params_of(cases[i].to, cases[i].dtype, cases[i].block_size, cases[i].to_blocks);
        rig_open(&to, &p);
        rig_seq *seqs[3] = {rig_seq_new(&from)};
        add(&from, seqs[0], 1000, 70);
        seqs[1] = rig_seq_fork(&from, seqs[0], 70);
        seqs[2] = rig_seq_fork(&from, seqs[0], 37);
        add(&from, seqs[2], 2000, 20);
        rig_extend(&from, seqs[1], 3); /* with a copy pending */
        const kvleaf_seq saved[3] = {seqs[0]->seq, seqs[1]->seq, seqs[2]->seq};
        kvleaf_seq loaded[3] = {0};
        ASSERT_OK(save(&from, path, saved, 3, false));
        ASSERT_OK(load(&to, path, loaded, 3));
        rig_seq *there[3];
        for (int j = 0; j < 3; j++) {
            there[j] = adopt(&to, seqs[j], loaded[j]);
            rig_check_stored(&to, there[j], "loaded");
            if (j != 1) /* whose last tokens still lie where the copy reads */
                rig_check_stored(&from, seqs[j], "saved");
        }
        kvleaf_blocks_stats stats = rig_stats(&to);
        int32_t block_size = cases[i].block_size;
        /* The copy that is pending, of a last block that is not full, is a block of its own. */
        int32_t blocks = (70 + block_size - 1) / block_size + (70 % block_size != 0) +
                         (57 + block_size - 1) / block_size - 37 / block_size;
        assert_int_equal(stats.used, to.num_groups * blocks);
        assert_int_equal(inspect(path).num_blocks, to.num_groups * blocks);
        add(&to, there[2], 3000, 9); /* into the blocks behind */
        rig_check_stored(&to, there[0], "beside");
        rig_check_stored(&to, there[2], "continued");
        rig_close(&from);
        rig_close(&to);
    }
    free(path);
    support_folder_remove(folder);
}

static rig_params stepping(void)
{
    rig_params p = rig_defaults();
    p.num_blocks = 40;
    p.window[0] = p.window[1] = 10;
    return p;
}

static void assert_same_rows(const rig *a, int32_t row_a, const rig *b, int32_t row_b, int32_t count)
{
    for (int32_t layer = 0; layer < a->p.num_layers; layer++)
        for (int32_t i = 0; i < count; i++)
            assert_memory_equal(rig_out(a, layer, row_a + i), rig_out(b, layer, row_b + i), rig_row_bytes(a, layer));
}

/* What left the window stays behind, and the sequences go on with the same bits. */
static void test_windows_and_the_next_steps(void **state)
{
    (void)state;
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    rig from, to;
    rig_params p = stepping();
    rig_open(&from, &p);
    p.num_blocks = 9;
    p.max_context = 64;
    rig_open(&to, &p);
    rig_seq *seq = rig_seq_new(&from);
    rig_extend(&from, seq, 41);
    rig_run_one(&from, seq, 41, KVLEAF_FAMILY_PREFILL, "prompt");
    rig_seq *child = rig_seq_fork(&from, seq, 41);
    kvleaf_seq loaded[2] = {0};
    ASSERT_OK(save(&from, path, (kvleaf_seq[]){seq->seq, child->seq}, 2, false));
    ASSERT_OK(load(&to, path, loaded, 2));
    assert_int_equal(inspect(path).num_blocks, 3);
    rig_seq *there[2] = {adopt(&to, seq, loaded[0]), adopt(&to, child, loaded[1])};
    rig_check_stored(&to, there[0], "loaded");
    for (int i = 0; i < 12; i++) { /* past a window's length */
        const int32_t tokens[] = {5000 + i, 6000 + i};
        rig_extend_with(&from, seq, &tokens[0], 1);
        rig_extend_with(&from, child, &tokens[1], 1);
        rig_extend_with(&to, there[0], &tokens[0], 1);
        rig_extend_with(&to, there[1], &tokens[1], 1);
        rig_run(&from, &(rig_step){.seqs = {seq, child}, .num_q = {1, 1}, .n = 2}, "the one that was saved");
        rig_run(&to, &(rig_step){.seqs = {there[0], there[1]}, .num_q = {1, 1}, .n = 2}, "the one that was loaded");
        assert_same_rows(&from, 0, &to, 0, 2);
    }
    rig_close(&from);
    rig_close(&to);
    free(path);
    support_folder_remove(folder);
}

/* The index alone: a prompt that was computed there is found here, and the rest of it comes out as in a cold run. */
static void test_prefix_cache(void **state)
{
    (void)state;
    enum { PROMPT = 30 };
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    int32_t tokens[PROMPT];
    rig from, to;
    const rig_params p = stepping();
    rig_open(&from, &p);
    rig_open(&to, &p);
    for (int32_t i = 0; i < PROMPT; i++)
        tokens[i] = 700 + i;
    rig_seq *seq = rig_seq_new(&from);
    rig_extend_with(&from, seq, tokens, PROMPT);
    rig_run_one(&from, seq, PROMPT, KVLEAF_FAMILY_PREFILL, "cold");
    rig_seq_end(&from, seq);
    ASSERT_OK(save(&from, path, NULL, 0, true));
    kvleaf_snapshot_info info = inspect(path);
    assert_int_equal(info.version, 1);
    assert_int_equal(info.block_size, 4);
    assert_int_equal(info.num_groups, 1);
    assert_int_equal(info.num_layers, 2);
    assert_int_equal(info.num_seqs, 0);
    assert_int_equal(info.num_indexed, PROMPT / 4);
    for (int again = 0; again < 2; again++) {
        ASSERT_OK(load(&to, path, NULL, 0));
        assert_int_equal(rig_stats(&to).used, 0);
        assert_int_equal(rig_stats(&to).indexed, rig_stats(&from).indexed);
    }
    rig_seq *again = rig_seq_new(&to);
    rig_extend_with(&to, again, tokens, PROMPT);
    assert_int_equal(again->committed, PROMPT / 4 * 4);
    rig_check_stored(&to, again, "found");
    rig_run_one(&to, again, PROMPT - again->committed, KVLEAF_FAMILY_PREFILL, "warm");
    assert_same_rows(&from, PROMPT / 4 * 4, &to, 0, PROMPT % 4);
    rig_close(&from);
    rig_close(&to);
    free(path);
    support_folder_remove(folder);
}

/* n = 3 with a shared prompt: its blocks are in the file once. */
static void test_shared_blocks_once(void **state)
{
    (void)state;
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    rig from;
    const rig_params p = params_of(KVLEAF_LAYOUT_ROWS, KVLEAF_F16, 16, 60);
    rig_open(&from, &p);
    rig_seq *seqs[3] = {rig_seq_new(&from)};
    add(&from, seqs[0], 100, 80);
    kvleaf_seq saved[3] = {seqs[0]->seq};
    ASSERT_OK(save(&from, path, saved, 1, false));
    uint64_t alone = inspect(path).bytes;
    for (int i = 1; i < 3; i++) {
        seqs[i] = rig_seq_fork(&from, seqs[0], 80);
        saved[i] = seqs[i]->seq;
    }
    ASSERT_OK(save(&from, path, saved, 3, true));
    kvleaf_snapshot_info info = inspect(path);
    assert_int_equal(info.num_seqs, 3);
    assert_int_equal(info.num_blocks, 2 * 5);
    assert_int_equal(info.num_indexed, 5);
    uint64_t data = kvleaf_cache_token_bytes(from.cache, 80) + 10 * 16;
    assert_true(alone > data && alone < data + 2000);
    assert_true(info.bytes > data && info.bytes < data + 8000);
    assert_int_equal(support_files(folder, "", NULL), 1);
    rig_close(&from);
    free(path);
    support_folder_remove(folder);
}

/* The file's bytes are those of what was saved: twice the same, and a slot without a token is zeros, whatever it held.
 */
static void test_same_bytes(void **state)
{
    (void)state;
    char *folder = support_folder(), *paths[2] = {support_path(folder, "a"), support_path(folder, "b")}, *bytes[2];
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        rig r;
        rig_params p = params_of(i ? KVLEAF_LAYOUT_CPU16 : KVLEAF_LAYOUT_ROWS, KVLEAF_F16, 16, i ? 4 : 20);
        rig_open(&r, &p);
        rig_seq *seq = rig_seq_new(&r);
        if (i) { /* all the blocks there are held other tokens before */
            rig_extend(&r, seq, 64);
            fill(&r, seq, 0, 64);
            rig_truncate(&r, seq, 0);
        }
        add(&r, seq, 100, 21);
        ASSERT_OK(save(&r, paths[i], &seq->seq, 1, false));
        bytes[i] = support_slurp(paths[i], &size[i]);
        rig_close(&r);
    }
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(bytes[0], bytes[1], size[0]);
    for (int i = 0; i < 2; i++) {
        free(bytes[i]);
        free(paths[i]);
    }
    support_folder_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_between_layouts), cmocka_unit_test(test_windows_and_the_next_steps),
        cmocka_unit_test(test_prefix_cache),    cmocka_unit_test(test_shared_blocks_once),
        cmocka_unit_test(test_same_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
