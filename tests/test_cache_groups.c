/* SPDX-License-Identifier: Apache-2.0 */
/* A model whose layers differ in window, softcap and head_dim, through the managed cache: every row against the
 * reference, in prefill, decode and mixed batches, over forks and truncations, with several plans open. */
#include <stdlib.h>
#include <string.h>

#include "rig.h"

enum { WINDOW = 10 };

/* Full layers of one head_dim, windowed ones with capped scores of another; the third reads the second's K/V. */
static rig_params hybrid(void)
{
    rig_params p = rig_defaults();
    p.num_layers = 4;
    p.window[1] = p.window[2] = WINDOW;
    p.softcap[1] = p.softcap[2] = 8;
    p.layer_dim[1] = p.layer_dim[2] = 8;
    p.kv_layer[2] = 2;
    p.num_blocks = 64;
    return p;
}

static void test_groups_of_layers(void **state)
{
    (void)state;
    rig r;
    rig_params p = hybrid();
    rig_open(&r, &p);
    const int32_t expected[] = {-1, 0, 1, 1, 0, -1};
    for (int32_t layer = -1; layer <= 4; layer++)
        assert_int_equal(kvleaf_cache_group(r.cache, layer), expected[layer + 1]);
    assert_int_equal(kvleaf_cache_group(NULL, 0), -1);
    int32_t count;
    ASSERT_FAILS(KVLEAF_INVALID, "group", kvleaf_seq_table(r.cache, rig_seq_new(&r)->seq, 2, NULL, 0, &count));
    rig_close(&r);
}

/* Prompts longer than the window, in chunks and beside each other; then decode far beyond it. */
static void test_steps(void **state)
{
    (void)state;
    rig r;
    rig_params p = hybrid();
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r);
    rig_extend(&r, a, 33);
    rig_extend(&r, b, 24);
    rig_run(&r, &(rig_step){.seqs = {a, b}, .num_q = {7, 24}, .n = 2}, "first chunk");
    rig_run(&r, &(rig_step){.seqs = {a}, .num_q = {26}, .n = 1}, "second chunk");
    kvleaf_seq early;
    ASSERT_FAILS(KVLEAF_INVALID, "pos", kvleaf_seq_fork(r.cache, a->seq, 31, &early)); /* its window is gone */
    rig_seq *c = rig_seq_fork(&r, a, 33);
    for (int32_t i = 0; i < 15; i++) {
        rig_seq *all[] = {a, b, c};
        rig_step step = {.n = 3, .family = i % 3 ? KVLEAF_FAMILY_AUTO : KVLEAF_FAMILY_PREFILL};
        for (int32_t k = 0; k < 3; k++) {
            step.seqs[k] = all[k];
            step.num_q[k] = 1 + (i + k) % 3;
            rig_extend(&r, all[k], step.num_q[k]);
        }
        rig_run(&r, &step, "decode");
    }
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, c, "child");
    /* The next token of b sees from position 45 on, so its blocks begin at 44. */
    assert_int_equal(b->committed, 54);
    ASSERT_FAILS(KVLEAF_INVALID, "length", kvleaf_seq_truncate(r.cache, b->seq, 52));
    rig_truncate(&r, b, 53);
    rig_extend(&r, b, 5);
    rig_run(&r, &(rig_step){.seqs = {b}, .num_q = {5}, .n = 1, .mask = KVLEAF_MASK_NONE}, "rewritten, without a mask");
    rig_seq_end(&r, a);
    rig_seq_end(&r, b);
    rig_seq_end(&r, c);
    kvleaf_blocks_stats stats = rig_stats(&r);
    assert_int_equal(stats.used, 0);
    rig_close(&r);
}

/* Where all layers have windows a sequence may be longer than the pools, up to max_context. */
static void test_windows_alone(void **state)
{
    (void)state;
    rig r;
    rig_params p = hybrid();
    p.window[0] = p.window[3] = WINDOW + 5;
    p.num_blocks = 10;
    p.max_context = 150;
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    while (seq->committed < 143) {
        int32_t count = 1 + seq->committed % 11;
        rig_extend(&r, seq, count);
        rig_run_one(&r, seq, count, KVLEAF_FAMILY_AUTO, "on and on");
    }
    rig_check_stored(&r, seq, "through 40 slots");
    int32_t room = 152 - seq->extended; /* whole blocks */
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "count", rig_try_extend(&r, seq, room + 1));
    ASSERT_OK(rig_try_extend(&r, seq, room));
    rig_close(&r);
}

/* All keys can be gathered as long as none has left the window. */
static void test_gather(void **state)
{
    (void)state;
    rig r;
    rig_params p = hybrid();
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    const kvleaf_exec exec = rig_exec(&r, &(rig_step){0});
    const kvleaf_tensor k = {.handle = r.k, .dtype = KVLEAF_F32}, v = {.handle = r.v, .dtype = KVLEAF_F32};
    for (int32_t turn = 0; turn < 3; turn++) {
        const rig_step step = {.seqs = {seq}, .num_q = {WINDOW}, .n = 1};
        rig_extend(&r, seq, WINDOW);
        ASSERT_OK(rig_build(&r, &step));
        rig_layers(&r, &step, "chunk");
        ASSERT_OK(kvleaf_gather(r.plan, 0, &k, &v, &exec));
        if (turn < 2) /* the first block goes with the commit of token 19 */
            ASSERT_OK(kvleaf_gather(r.plan, 1, &k, &v, &exec));
        else
            ASSERT_FAILS(KVLEAF_INVALID, "layer", kvleaf_gather(r.plan, 1, &k, &v, &exec));
        rig_commit(&r, &step, NULL);
    }
    rig_close(&r);
}

/* Two plans with open steps, each over both groups, closed in the other order. */
static void test_two_open_plans(void **state)
{
    (void)state;
    rig r;
    rig_params p = hybrid();
    rig_open(&r, &p);
    kvleaf_plan *other = NULL;
    ASSERT_OK(rig_make_plan(&r, &other));
    rig_seq *a = rig_seq_new(&r), *b = rig_seq_new(&r);
    rig_extend(&r, a, 19);
    rig_extend(&r, b, 14);
    for (int32_t i = 0; i < 3; i++) {
        const rig_step first = {.seqs = {a}, .num_q = {i ? 1 : 19}, .n = 1};
        const rig_step second = {.seqs = {b}, .num_q = {i ? 2 : 14}, .n = 1, .plan = other};
        ASSERT_OK(rig_build(&r, &first));
        ASSERT_OK(rig_build(&r, &second));
        rig_layers(&r, &second, "second");
        rig_layers(&r, &first, "first");
        rig_commit(&r, &first, NULL);
        rig_commit(&r, &second, NULL);
        rig_extend(&r, a, 1);
        rig_extend(&r, b, 2);
    }
    rig_check_stored(&r, a, "first");
    rig_check_stored(&r, b, "second");
    kvleaf_plan_destroy(&other);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_groups_of_layers), cmocka_unit_test(test_steps),
        cmocka_unit_test(test_windows_alone),    cmocka_unit_test(test_gather),
        cmocka_unit_test(test_two_open_plans),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
