/* SPDX-License-Identifier: Apache-2.0 */
/* Sharing on the device: forks with different tails, every value checked; shared blocks keep their bytes; copies run
 * before the writes, for whomever they are pending and whoever's step comes first. */
#include <stdlib.h>
#include <string.h>

#include "attention/state.h"
#include "cache/cache.h"
#include "rig.h"

/* All bytes of the pool, to see which blocks changed. */
typedef struct picture {
    uint8_t *layer[RIG_LAYERS];
    size_t size;
} picture;

static picture take_picture(const rig *r)
{
    picture p = {{0}, 0};
    for (int32_t i = 0; i < r->p.num_layers; i++)
        p.layer[i] = rig_pool_bytes(r, i, &p.size);
    return p;
}

static void forget(picture *p)
{
    for (int32_t i = 0; i < RIG_LAYERS; i++)
        free(p->layer[i]);
}

/* Every block but the listed ones has the bytes it had. */
static void assert_only_changed(const rig *r, const picture *before, const int32_t *blocks, int32_t count)
{
    picture now = take_picture(r);
    size_t block_bytes = now.size / (size_t)r->p.num_blocks;
    for (int32_t block = 0; block < r->p.num_blocks; block++) {
        bool may = false;
        for (int32_t i = 0; i < count; i++)
            may = may || blocks[i] == block;
        for (int32_t i = 0; !may && i < r->p.num_layers; i++)
            if (memcmp(now.layer[i] + (size_t)block * block_bytes, before->layer[i] + (size_t)block * block_bytes,
                       block_bytes))
                fail_msg("block %d changed in layer %d", block, i);
    }
    forget(&now);
}

static int32_t last_block(const rig *r, const rig_seq *seq)
{
    int32_t table[64], count = 0;
    ASSERT_OK(kvleaf_seq_table(r->cache, seq->seq, 0, table, 64, &count));
    return table[count - 1];
}

/* atlas #1193 on the device: 6 tokens in blocks of 4, forked twice, different tails; then on and on. */
static void test_different_tails(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 6);
    rig_run_one(&r, a, 6, KVLEAF_FAMILY_AUTO, "prompt");
    rig_seq *b = rig_seq_fork(&r, a, 6), *c = rig_seq_fork(&r, a, 5);
    rig_extend(&r, b, 1);
    rig_extend(&r, c, 2);
    int32_t changed[] = {last_block(&r, b), last_block(&r, c)};
    assert_int_not_equal(changed[0], changed[1]);
    picture before = take_picture(&r);
    rig_run(&r, &(rig_step){.seqs = {c, b}, .num_q = {2, 1}, .n = 2}, "tails");
    assert_only_changed(&r, &before, changed, 2);
    forget(&before);
    assert_int_equal(rig_stats(&r).copies, 2);
    for (int32_t i = 0; i < 9; i++) {
        rig_extend(&r, a, 1);
        rig_extend(&r, b, 1);
        rig_extend(&r, c, 1);
        rig_run(&r, &(rig_step){.seqs = {a, b, c}, .num_q = {1, 1, 1}, .n = 3}, "on");
    }
    assert_int_equal(rig_stats(&r).copies, 2); /* the last one in the block stayed in it */
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, b, "first child");
    rig_check_stored(&r, c, "second child");
    rig_seq_end(&r, a);
    rig_check_stored(&r, b, "after the parent went");
    rig_check_stored(&r, c, "after the parent went");
    rig_close(&r);
}

/* A child's copy is made by the step that comes first, here the parent's, which writes into the source. */
static void test_copy_in_anothers_step(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 7);
    rig_run_one(&r, a, 7, KVLEAF_FAMILY_AUTO, "prompt");
    rig_seq *b = rig_seq_fork(&r, a, 7);
    rig_extend(&r, b, 1);
    rig_truncate(&r, a, 5); /* and writes again what b has yet to copy */
    rig_extend(&r, a, 3);
    rig_run_one(&r, a, 3, KVLEAF_FAMILY_AUTO, "parent first");
    rig_run_one(&r, b, 1, KVLEAF_FAMILY_AUTO, "child");
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, b, "child");
    rig_close(&r);
}

/* A fork in the midst of the parent's step, its extension too, and its own step before the parent's writes. */
static void test_fork_beside_an_open_step(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    kvleaf_plan *other = NULL;
    ASSERT_OK(rig_make_plan(&r, &other));
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 5);
    rig_run_one(&r, a, 5, KVLEAF_FAMILY_AUTO, "prompt");
    rig_extend(&r, a, 2);
    const rig_step parent = {.seqs = {a}, .num_q = {2}, .n = 1};
    ASSERT_OK(rig_build(&r, &parent));
    rig_load(&r, &parent, 0);
    ASSERT_OK(rig_append(&r, &parent, 0)); /* layer 0 before the child's copy, layer 1 after it */
    rig_seq *b = rig_seq_fork(&r, a, 5);
    rig_extend(&r, b, 2);
    rig_run(&r, &(rig_step){.seqs = {b}, .num_q = {2}, .n = 1, .plan = other}, "child");
    rig_load(&r, &parent, 0);
    ASSERT_OK(rig_attend(&r, &parent, 0));
    rig_check(&r, &parent, 0, "parent");
    rig_load(&r, &parent, 1);
    ASSERT_OK(rig_append(&r, &parent, 1));
    ASSERT_OK(rig_attend(&r, &parent, 1));
    rig_check(&r, &parent, 1, "parent");
    rig_commit(&r, &parent, NULL);
    rig_check_stored(&r, a, "parent");
    rig_check_stored(&r, b, "child");
    kvleaf_plan_destroy(&other);
    rig_close(&r);
}

/* A step with copies that is rolled back: the copies are made, the tokens are not. */
static void test_rollback_with_copies(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    rig_seq *a = rig_seq_new(&r);
    rig_extend(&r, a, 6);
    rig_run_one(&r, a, 6, KVLEAF_FAMILY_AUTO, "prompt");
    rig_seq *b = rig_seq_fork(&r, a, 6);
    rig_extend(&r, b, 1);
    const rig_step step = {.seqs = {b}, .num_q = {1}, .n = 1};
    ASSERT_OK(rig_build(&r, &step));
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    rig_check_stored(&r, b, "after rollback");
    rig_extend(&r, a, 1);
    rig_run_one(&r, a, 1, KVLEAF_FAMILY_AUTO, "parent");
    rig_run(&r, &step, "child, again");
    ASSERT_OK(rig_build(&r, &(rig_step){.n = 0})); /* nothing pending, nothing to do */
    ASSERT_OK(kvleaf_plan_rollback(r.plan));
    assert_int_equal(rig_stats(&r).copies, 1);
    rig_close(&r);
}

/* Beams: at each step some sequences are dropped and others forked; all values stay right and blocks shared. */
static void test_beams(void **state)
{
    (void)state;
    enum { BEAMS = 4, STEPS = 24 };
    support_rng rng = {support_seed(7)};
    rig r;
    rig_params p = rig_defaults();
    rig_open(&r, &p);
    rig_seq *beams[BEAMS] = {rig_seq_new(&r)};
    rig_extend(&r, beams[0], 10);
    rig_run_one(&r, beams[0], 10, KVLEAF_FAMILY_AUTO, "prompt");
    for (int32_t i = 1; i < BEAMS; i++)
        beams[i] = rig_seq_fork(&r, beams[0], 10);
    for (int32_t step = 0; step < STEPS; step++) {
        rig_step all = {.n = BEAMS};
        for (int32_t i = 0; i < BEAMS; i++) {
            rig_extend(&r, beams[i], 1);
            all.seqs[i] = beams[i];
            all.num_q[i] = 1;
        }
        rig_run(&r, &all, "beams");
        int32_t dropped = support_range(&rng, 0, BEAMS - 1),
                kept = (dropped + support_range(&rng, 1, BEAMS - 1)) % BEAMS;
        rig_seq_end(&r, beams[dropped]);
        beams[dropped] = rig_seq_fork(&r, beams[kept], beams[kept]->committed - support_range(&rng, 0, 3));
    }
    for (int32_t i = 0; i < BEAMS; i++) {
        rig_check_stored(&r, beams[i], "at the end");
        rig_seq_end(&r, beams[i]);
    }
    assert_int_equal(rig_stats(&r).used, 0);
    rig_close(&r);
}

/* The same in random order, over two plans, with rollbacks and truncations; the model has the last word. */
static void test_random(void **state)
{
    (void)state;
    enum { SEQS = 6, ACTIONS = 300 };
    support_rng rng = {support_seed(11)};
    rig r;
    rig_params p = rig_defaults();
    p.num_layers = 1;
    p.num_blocks = 24;
    p.max_sequences = SEQS;
    rig_open(&r, &p);
    rig_seq *seqs[SEQS] = {0};
    for (int32_t i = 0; i < ACTIONS; i++) {
        int32_t at = support_range(&rng, 0, SEQS - 1), other = support_range(&rng, 0, SEQS - 1);
        int32_t action = support_range(&rng, 0, 9);
        if (!seqs[at]) {
            seqs[at] = seqs[other] && action < 7
                           ? rig_seq_fork(&r, seqs[other], support_range(&rng, 0, seqs[other]->committed))
                           : rig_seq_new(&r);
        } else if (action < 4) {
            rig_try_extend(&r, seqs[at], support_range(&rng, 1, 7));
        } else if (action == 4) {
            rig_truncate(&r, seqs[at], support_range(&rng, 0, seqs[at]->extended));
        } else if (action == 5) {
            rig_seq_end(&r, seqs[at]);
            seqs[at] = NULL;
            if (seqs[other]) {
                seqs[at] = rig_seq_fork(&r, seqs[other], seqs[other]->committed);
                rig_try_extend(&r, seqs[at], 1);
                rig_try_extend(&r, seqs[other], 1);
            }
        } else {
            rig_step step = {.family = (kvleaf_family)support_range(&rng, 0, 2)};
            int32_t accepted[SEQS];
            for (int32_t j = 0; j < SEQS; j++) {
                if (!seqs[j] || seqs[j]->extended == seqs[j]->committed || support_range(&rng, 0, 2) == 0)
                    continue;
                step.num_q[step.n] = support_range(&rng, 1, seqs[j]->extended - seqs[j]->committed);
                accepted[step.n] = support_range(&rng, 0, step.num_q[step.n]);
                step.seqs[step.n++] = seqs[j];
            }
            ASSERT_OK(rig_build(&r, &step));
            rig_layers(&r, &step, "random");
            if (action == 6)
                ASSERT_OK(kvleaf_plan_rollback(r.plan));
            else
                rig_commit(&r, &step, action == 7 ? accepted : NULL);
        }
        if (i % 10)
            continue;
        ASSERT_OK(rig_build(&r, &(rig_step){.n = 0})); /* makes what is pending */
        ASSERT_OK(kvleaf_plan_rollback(r.plan));
        for (int32_t j = 0; j < SEQS; j++)
            if (seqs[j])
                rig_check_stored(&r, seqs[j], "random");
    }
    for (int32_t i = 0; i < SEQS; i++)
        if (seqs[i])
            rig_seq_end(&r, seqs[i]);
    assert_int_equal(rig_stats(&r).used, 0);
    assert_true(rig_stats(&r).copies > 5);
    rig_close(&r);
}

/* Forks decode over their common blocks: a plan that reads them once for all gives the bits of one that doesn't. */
static void test_common_blocks_are_read_once(void **state)
{
    (void)state;
    rig r;
    rig_params p = rig_defaults();
    p.num_blocks = 300;
    rig_open(&r, &p);
    kvleaf_plan *plans[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++)
        ASSERT_OK(kvleaf_plan_create(r.cache,
                                     kvleaf_plan_params(.max_entries = 8, .max_tokens = 256,
                                                        .sharing = i ? KVLEAF_SHARING_OFF : KVLEAF_SHARING_ALWAYS),
                                     &plans[i]));
    rig_seq *seqs[4] = {rig_seq_new(&r)};
    rig_extend(&r, seqs[0], 1050);
    for (int32_t left = 1050; left > 0; left -= 250)
        rig_run_one(&r, seqs[0], left < 250 ? left : 250, KVLEAF_FAMILY_AUTO, "prompt");
    for (int32_t i = 1; i < 4; i++)
        seqs[i] = rig_seq_fork(&r, seqs[0], 1050 - 300 * (i - 1)); /* 1050, 750, 450 tokens in common */
    rig_step step = {.seqs = {seqs[0], seqs[1], seqs[2], seqs[3]}, .num_q = {1, 1, 1, 1}, .n = 4};
    for (int32_t i = 0; i < 4; i++)
        rig_extend(&r, seqs[i], 1);
    size_t bytes = 4 * rig_row_bytes(&r, 0);
    uint8_t *rows = malloc(bytes * (size_t)p.num_layers);
    int32_t pieces[2];
    assert_non_null(rows);
    for (int i = 0; i < 2; i++) {
        step.plan = plans[i];
        ASSERT_OK(rig_build(&r, &step));
        pieces[i] = plans[i]->groups[0].engine->now.num_splits;
        rig_layers(&r, &step, i ? "apart" : "together");
        for (int32_t layer = 0; layer < p.num_layers; layer++) {
            if (i)
                assert_memory_equal(rows + (size_t)layer * bytes, rig_out(&r, layer, 0), bytes);
            else
                memcpy(rows + (size_t)layer * bytes, rig_out(&r, layer, 0), bytes);
        }
        ASSERT_OK(kvleaf_plan_rollback(plans[i]));
    }
    assert_true(pieces[0] <= pieces[1]);
    if (plans[0]->groups[0].engine->chosen[KVL_DECODE].variant->shared_pairs)
        assert_int_equal(pieces[0], pieces[1] - 3); /* the first split of three rows, the second of two */
    free(rows);
    for (int i = 0; i < 2; i++)
        kvleaf_plan_destroy(&plans[i]);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_different_tails),
        cmocka_unit_test(test_copy_in_anothers_step),
        cmocka_unit_test(test_fork_beside_an_open_step),
        cmocka_unit_test(test_rollback_with_copies),
        cmocka_unit_test(test_beams),
        cmocka_unit_test(test_common_blocks_are_read_once),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
