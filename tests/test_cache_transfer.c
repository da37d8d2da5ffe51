/* SPDX-License-Identifier: Apache-2.0 */
/* Export and import of tokens: the bytes are those of the model, in whatever layout they lie; what is committed already
 * and what is shared is never written; pending copies come first; refusals and failures change nothing. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"
#include "shim.h"
#include "stats.h"

/* The dims of two groups, with and without padding in the packed layouts. No plan: nothing is computed. */
static rig_params params_of(kvleaf_layout layout, kvleaf_dtype dtype, int32_t block_size)
{
    rig_params p = rig_defaults();
    p.layout = layout;
    p.kv_dtype = dtype;
    p.q_dtype = p.out_dtype = dtype;
    p.block_size = block_size;
    p.num_blocks = 24;
    p.num_layers = 3;
    p.layer_dim[1] = 12;
    p.kv_layer[2] = 1;
    p.no_plan = true;
    return p;
}

/* Two groups of the usual geometry, of which one has a window that hides nothing. */
static rig_params stepping(void)
{
    rig_params p = rig_defaults();
    p.num_blocks = 32;
    p.num_layers = 3;
    p.window[1] = 64;
    p.kv_layer[2] = 1;
    return p;
}

static void assert_exported(rig *r, const rig_seq *seq, int32_t start, int32_t count, const char *what)
{
    uint64_t size;
    uint8_t *expected = rig_rows(r, seq, start, count, &size), *bytes = support_guarded((size_t)size);
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    assert_int_equal(kvleaf_cache_token_bytes(r->cache, count), size);
    ASSERT_OK(kvleaf_seq_export(r->cache, seq->seq, start, count, bytes, size, &exec));
    for (size_t i = 0; i < size; i++)
        if (bytes[i] != expected[i])
            fail_msg("%s: tokens %d .. %d: byte %zu of %zu is %02x, expected %02x", what, start, start + count - 1, i,
                     (size_t)size, bytes[i], expected[i]);
    support_guarded_free(bytes);
    free(expected);
}

/* Fills tokens that are extended, as another cache exported them. */
static void import(rig *r, rig_seq *seq, int32_t start, int32_t count)
{
    uint64_t size;
    uint8_t *bytes = rig_rows(r, seq, start, count, &size);
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    ASSERT_OK(kvleaf_seq_import(r->cache, seq->seq, start, count, bytes, size, &exec));
    if (seq->committed < start + count)
        seq->committed = start + count;
    rig_check_lengths(r, seq, seq->committed);
    free(bytes);
}

/* From one layout and block size to another, in pieces. */
static void test_between_caches(void **state)
{
    (void)state;
    static const struct {
        kvleaf_layout from, to;
        kvleaf_dtype dtype;
        int32_t from_block, to_block;
    } cases[] = {
        {KVLEAF_LAYOUT_ROWS, KVLEAF_LAYOUT_CPU16, KVLEAF_F32, 4, 16},
        {KVLEAF_LAYOUT_CPU16, KVLEAF_LAYOUT_SWIZZLE8, KVLEAF_F32, 16, 8},
        {KVLEAF_LAYOUT_DIM8, KVLEAF_LAYOUT_ROWS, KVLEAF_F16, 8, 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig from, to;
        rig_params p = params_of(cases[i].from, cases[i].dtype, cases[i].from_block);
        rig_open(&from, &p);
        p = params_of(cases[i].to, cases[i].dtype, cases[i].to_block);
        rig_open(&to, &p);
        rig_seq *source = rig_seq_new(&from), *target = rig_seq_new(&to);
        rig_extend(&from, source, 37);
        import(&from, source, 0, 37);
        rig_check_stored(&from, source, "imported whole");
        assert_exported(&from, source, 0, 37, "whole");
        assert_exported(&from, source, 9, 14, "middle");
        assert_exported(&from, source, 37, 0, "nothing");
        rig_extend_with(&to, target, source->tokens, 37);
        import(&to, target, 0, 6);
        import(&to, target, 4, 33);
        import(&to, target, 3, 8); /* all committed: nothing happens */
        rig_check_stored(&to, target, "imported in pieces");
        rig_close(&from);
        rig_close(&to);
    }
}

/* LMCache #2206: 40 tokens are there, and shared; 32 .. 49 are imported with other values below 40. */
static void test_committed_and_shared_are_kept(void **state)
{
    (void)state;
    for (int32_t committed = 40; committed < 44; committed += 3) { /* at a block's edge, and within a block */
        rig r;
        rig_params p = stepping();
        rig_open(&r, &p);
        rig_seq *parent = rig_seq_new(&r);
        rig_extend(&r, parent, committed);
        rig_run_one(&r, parent, committed, KVLEAF_FAMILY_AUTO, "prompt");
        rig_seq *child = rig_seq_fork(&r, parent, committed);
        rig_extend(&r, child, 50 - committed);
        uint64_t size;
        uint8_t *bytes = rig_rows(&r, child, 32, 18, &size);
        size_t at = 0;
        const size_t row = 2 * 16 * sizeof(float); /* of a token, in K and V of each layer */
        for (int side = 0; side < 4; side++, at += 18 * row)
            memset(bytes + at, 0x11, (size_t)(committed - 32) * row);
        assert_int_equal(at, size);
        const kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
        ASSERT_OK(kvleaf_seq_import(r.cache, child->seq, 32, 18, bytes, size, &exec));
        child->committed = 50;
        free(bytes);
        rig_check_lengths(&r, child, 50);
        rig_check_stored(&r, parent, "parent");
        rig_check_stored(&r, child, "child");
        rig_extend(&r, parent, 1);
        rig_extend(&r, child, 1);
        rig_run(&r, &(rig_step){.seqs = {parent, child}, .num_q = {1, 1}, .n = 2}, "both go on");
        rig_close(&r);
    }
}

/* The block that a copy is to fill is read, and written to, behind the copy. */
static void test_pending_copies_first(void **state)
{
    (void)state;
    rig r;
    rig_params p = stepping();
    rig_open(&r, &p);
    rig_seq *parent = rig_seq_new(&r);
    rig_extend(&r, parent, 15);
    rig_run_one(&r, parent, 15, KVLEAF_FAMILY_AUTO, "prompt");
    rig_seq *first = rig_seq_fork(&r, parent, 14), *second = rig_seq_fork(&r, parent, 11);
    int64_t used = rig_stats(&r).used;
    rig_extend(&r, first, 3);
    assert_int_equal(rig_stats(&r).used, used + 2 * r.num_groups); /* the copy of the last block, and a new one */
    assert_exported(&r, first, 0, 14, "export behind a copy");
    assert_int_equal(rig_stats(&r).pinned, 0);
    rig_extend(&r, second, 4);
    import(&r, second, 11, 4);
    assert_exported(&r, second, 0, 15, "import behind a copy");
    rig_check_stored(&r, parent, "parent");
    rig_run_one(&r, first, 3, KVLEAF_FAMILY_AUTO, "on");
    rig_close(&r);
}

static void test_refusals(void **state)
{
    (void)state;
    rig r, foreign;
    rig_params p = stepping();
    rig_open(&r, &p);
    rig_open(&foreign, &p);
    rig_seq *seq = rig_seq_new(&r), *far = rig_seq_new(&foreign), *gone = rig_seq_new(&r);
    kvleaf_seq stale = gone->seq;
    rig_seq_end(&r, gone);
    rig_extend(&r, seq, 10);
    rig_run_one(&r, seq, 10, KVLEAF_FAMILY_AUTO, "prompt");
    rig_extend(&r, seq, 5);
    const struct {
        bool import;
        kvleaf_seq seq;
        int64_t start, count, more; /* bytes beside what count takes */
        kvleaf_status status;
        const char *field;
    } cases[] = {
        {false, 0, 0, 1, 0, KVLEAF_INVALID, "seq"},
        {false, stale, 0, 1, 0, KVLEAF_STALE, "seq"},
        {false, far->seq, 0, 1, 0, KVLEAF_FOREIGN, "seq"},
        {false, seq->seq, -1, 1, 0, KVLEAF_INVALID, "start"},
        {false, seq->seq, 11, 0, 0, KVLEAF_INVALID, "start"},
        {false, seq->seq, 0, -1, 0, KVLEAF_INVALID, "count"},
        {false, seq->seq, 4, 7, 0, KVLEAF_INVALID, "count"},
        {false, seq->seq, 4, INT64_MAX, 0, KVLEAF_INVALID, "count"},
        {false, seq->seq, 4, 6, -1, KVLEAF_TOO_SMALL, "size"},
        {true, 0, 0, 1, 0, KVLEAF_INVALID, "seq"},
        {true, stale, 0, 1, 0, KVLEAF_STALE, "seq"},
        {true, far->seq, 0, 1, 0, KVLEAF_FOREIGN, "seq"},
        {true, seq->seq, -1, 1, 0, KVLEAF_INVALID, "start"},
        {true, seq->seq, 11, 1, 0, KVLEAF_INVALID, "start"},
        {true, seq->seq, 0, -1, 0, KVLEAF_INVALID, "count"},
        {true, seq->seq, 10, 6, 0, KVLEAF_INVALID, "count"},
        {true, seq->seq, 10, 5, -1, KVLEAF_INVALID, "size"},
        {true, seq->seq, 10, 5, 1, KVLEAF_INVALID, "size"},
    };
    uint8_t *bytes = support_guarded((size_t)kvleaf_cache_token_bytes(r.cache, 20));
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    kvleaf_blocks_stats before = rig_stats(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t count = cases[i].count > 0 && cases[i].count < 20 ? cases[i].count : 0;
        uint64_t size = kvleaf_cache_token_bytes(r.cache, count) + (uint64_t)cases[i].more;
        ASSERT_FAILS(
            cases[i].status, cases[i].field,
            cases[i].import
                ? kvleaf_seq_import(r.cache, cases[i].seq, cases[i].start, cases[i].count, bytes, size, &exec)
                : kvleaf_seq_export(r.cache, cases[i].seq, cases[i].start, cases[i].count, bytes, size, &exec));
    }
    uint64_t size = kvleaf_cache_token_bytes(r.cache, 5);
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_export(NULL, seq->seq, 0, 5, bytes, size, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_seq_import(NULL, seq->seq, 10, 5, bytes, size, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "bytes", kvleaf_seq_export(r.cache, seq->seq, 0, 5, NULL, size, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "bytes", kvleaf_seq_import(r.cache, seq->seq, 10, 5, NULL, size, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "exec", kvleaf_seq_export(r.cache, seq->seq, 0, 5, bytes, size, NULL));
    exec.queue = foreign.queue;
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvleaf_seq_export(r.cache, seq->seq, 0, 5, bytes, size, &exec));
    ASSERT_FAILS(KVLEAF_FOREIGN, "queue", kvleaf_seq_import(r.cache, seq->seq, 10, 5, bytes, size, &exec));
    exec.queue = r.queue;
    const rig_step step = {.seqs = {seq}, .num_q = {2}, .n = 1};
    ASSERT_OK(rig_build(&r, &step));
    ASSERT_FAILS(KVLEAF_BUSY, "seq", kvleaf_seq_import(r.cache, seq->seq, 10, 5, bytes, size, &exec));
    assert_exported(&r, seq, 0, 10, "beside an open step");
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    kvleaf_blocks_stats after = rig_stats(&r);
    assert_true(same_stats(&before, &after));
    assert_int_equal(kvleaf_cache_token_bytes(NULL, 3), 0);
    assert_int_equal(kvleaf_cache_token_bytes(r.cache, -3), 0);
    assert_true(kvleaf_cache_token_bytes(r.cache, INT64_MAX) == UINT64_MAX);
    support_guarded_free(bytes);
    import(&r, seq, 10, 5);
    rig_check_stored(&r, seq, "after refusals");
    rig_close(&foreign);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_between_caches),
        cmocka_unit_test(test_committed_and_shared_are_kept),
        cmocka_unit_test(test_pending_copies_first),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
