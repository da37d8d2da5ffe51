/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks_driver.h"

#include <stdlib.h>
#include <string.h>

#include "blocks_pair.h"

enum { STEPS = 3, PROMPTS = 6, WORDS = 4, NO_STEP = -1 };

struct driver {
    blocks_pair pair;
    model before; /* the last operation, where allocations may fail */
    int32_t failing;
    driver_tally tally;
    int32_t step[MODEL_SEQUENCES]; /* the open step that a sequence is in, or NO_STEP */
    int32_t ids[MODEL_TOKENS];     /* work space of an extend */
    int32_t prompts[PROMPTS][MODEL_TOKENS];
    int32_t prompt[MODEL_SEQUENCES]; /* which of them a sequence follows */
    kvleaf_seq destroyed, foreign;   /* handles that must be refused */
    kvleaf_blocks *other;            /* whose handle `foreign` is */
    uint64_t random;
    const uint8_t *bytes; /* NULL: random choices */
    size_t left;
};

static uint32_t next_random(driver *d)
{
    d->random ^= d->random << 13;
    d->random ^= d->random >> 7;
    d->random ^= d->random << 17;
    return (uint32_t)(d->random >> 32);
}

/* A number below n. */
static int32_t choose(driver *d, int32_t n)
{
    if (n <= 1)
        return 0;
    if (!d->bytes)
        return (int32_t)(next_random(d) % (uint32_t)n);
    uint32_t bits = 0;
    for (int32_t reach = n - 1; reach > 0 && d->left > 0; reach >>= 8, d->left--)
        bits = bits << 8 | *d->bytes++;
    return (int32_t)(bits % (uint32_t)n);
}

static bool one_in(driver *d, int32_t n)
{
    return choose(d, n) == n - 1;
}

/* Memory does not run out by the fuzzer's bytes: how often the manager allocates is its own business. */
static void *fickle_allocate(void *user, size_t size)
{
    driver *d = user;
    return d->failing && next_random(d) % (uint32_t)d->failing == 0 ? NULL : malloc(size);
}

static void fickle_release(void *user, void *memory)
{
    (void)user;
    free(memory);
}

/* Compares an answer with the model's. False where nothing has happened, also because memory ran out. */
static bool answered(driver *d, kvleaf_status got, kvleaf_status expected)
{
    d->tally.statuses[-got]++;
    if (got == KVLEAF_NO_MEMORY && d->failing && expected == KVLEAF_OK) {
        d->pair.m = d->before;
        return false;
    }
    if (got != expected)
        pair_wrong(&d->pair, "%s, not %s", kvleaf_status_name(got), kvleaf_status_name(expected));
    return got == KVLEAF_OK;
}

/* A live sequence, or -1. */
static int32_t any_sequence(driver *d)
{
    int32_t live[MODEL_SEQUENCES], n = 0;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        if (d->pair.m.sequences[i].live)
            live[n++] = i;
    return n ? live[choose(d, n)] : -1;
}

static void create(driver *d)
{
    kvleaf_seq_params params = {.struct_size = sizeof params, .user = (uint64_t)choose(d, 100)};
    bool usual = choose(d, 2) == 0;
    kvleaf_seq handle = 0;
    int32_t at = -1;
    pair_note(&d->pair, "create user %d", usual ? -1 : (int)params.user);
    kvleaf_status expected = model_create(&d->pair.m, usual ? NULL : &params, &at);
    if (!answered(d, kvleaf_blocks_seq_create(d->pair.real, usual ? NULL : &params, &handle), expected))
        return;
    d->pair.handles[at] = handle;
    d->step[at] = NO_STEP;
    d->prompt[at] = choose(d, PROMPTS);
}

/* Tokens of the sequence's prompt, now and then another one, which leads it astray. */
static void choose_ids(driver *d, int32_t at, int64_t from, int64_t count, int32_t *ids)
{
    for (int64_t i = 0; i < count; i++)
        ids[i] = one_in(d, 60) ? choose(d, WORDS) : d->prompts[d->prompt[at]][(from + i) % MODEL_TOKENS];
}

static void extend_by(driver *d, int32_t at, int64_t count)
{
    int32_t *ids = d->ids;
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .ids = one_in(d, 5) ? NULL : ids, .count = count};
    int64_t cached = -1, expected_cached = -1;
    bool can = false;
    choose_ids(d, at, d->pair.m.sequences[at].extended, count, ids);
    pair_note(&d->pair, "extend %d by %d%s", at, (int)count, tokens.ids ? "" : " unknown");
    kvleaf_status status = kvleaf_blocks_can_extend(d->pair.real, d->pair.handles[at], count, &can);
    if (status || can != model_can_extend(&d->pair.m, at, count))
        pair_wrong(&d->pair, "can_extend says %d", can);
    kvleaf_status expected = model_extend(&d->pair.m, at, &tokens, ids, &expected_cached);
    status = kvleaf_blocks_seq_extend(d->pair.real, d->pair.handles[at], &tokens, &cached);
    if (answered(d, status, expected) && cached != expected_cached)
        pair_wrong(&d->pair, "cached is %d, not %d", (int)cached, (int)expected_cached);
}

static void extend(driver *d)
{
    int32_t at = any_sequence(d);
    if (at < 0)
        return;
    bool far = one_in(d, 8);
    extend_by(d, at, choose(d, far ? MODEL_TOKENS : d->pair.m.p.block_size + 2));
}

static void fork(driver *d)
{
    int32_t at = any_sequence(d), child = -1;
    if (at < 0)
        return;
    int64_t committed = d->pair.m.sequences[at].committed, pos = committed - choose(d, 3);
    if (one_in(d, 3))
        pos = choose(d, (int32_t)committed + 3) - 1; /* one too far now and then */
    kvleaf_seq handle = 0;
    pair_note(&d->pair, "fork %d at %d", at, (int)pos);
    kvleaf_status expected = model_fork(&d->pair.m, at, pos, &child);
    if (!answered(d, kvleaf_blocks_seq_fork(d->pair.real, d->pair.handles[at], pos, &handle), expected))
        return;
    d->pair.handles[child] = handle;
    d->step[child] = NO_STEP;
    d->prompt[child] = d->prompt[at];
    if (choose(d, 2))
        return;
    if (d->failing)
        d->before = d->pair.m;
    extend_by(d, child, 1 + choose(d, d->pair.m.p.block_size));
}

static void truncate(driver *d)
{
    int32_t at = any_sequence(d);
    if (at < 0)
        return;
    int64_t extended = d->pair.m.sequences[at].extended;
    bool far = one_in(d, 4);
    int64_t length = extended + 1 - choose(d, far ? (int32_t)extended + 3 : d->pair.m.p.block_size + 2);
    pair_note(&d->pair, "truncate %d to %d", at, (int)length);
    kvleaf_status expected = model_truncate(&d->pair.m, at, length);
    answered(d, kvleaf_blocks_seq_truncate(d->pair.real, d->pair.handles[at], length), expected);
}

static void destroy(driver *d)
{
    int32_t at = any_sequence(d);
    if (at < 0)
        return;
    kvleaf_seq handle = d->pair.handles[at];
    pair_note(&d->pair, "destroy %d", at);
    kvleaf_status expected = model_destroy(&d->pair.m, at);
    if (answered(d, kvleaf_blocks_seq_destroy(d->pair.real, &d->pair.handles[at]), expected))
        d->destroyed = handle;
}

/* Makes the first pending copies of a group, all of them where `most` is negative. */
static void copy_blocks(driver *d, int32_t group, int32_t most)
{
    const kvleaf_block_copy *copies = NULL;
    kvleaf_block_copy made[MODEL_BLOCKS];
    int32_t count = -1;
    if (kvleaf_blocks_copies(d->pair.real, group, &copies, &count) || count != d->pair.m.groups[group].num_copies)
        pair_wrong(&d->pair, "%d copies are pending in group %d, not %d", count, group,
                   d->pair.m.groups[group].num_copies);
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = 0; j < count; j++)
            if (copies[i].src == copies[j].dst)
                pair_wrong(&d->pair, "block %d is copied and written by pending copies", copies[i].src);
    count = most >= 0 && most < count ? most : count;
    memcpy(made, copies, (size_t)count * sizeof *made);
    if (!model_make_copies(&d->pair.m, group, made, count))
        pair_wrong(&d->pair, "a copy is listed that is not pending");
    answered(d, kvleaf_blocks_copies_done(d->pair.real, group, count), KVLEAF_OK);
    d->tally.copies += count;
}

static void copy_some(driver *d)
{
    int32_t group = choose(d, d->pair.m.p.num_groups), most = choose(d, 3);
    pair_note(&d->pair, "copies of group %d, at most %d", group, most);
    copy_blocks(d, group, most);
}

/* The number of an open step that there is room for, or NO_STEP. */
static int32_t closed_step(const driver *d)
{
    bool open[STEPS] = {false};
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        if (d->pair.m.sequences[i].live && d->step[i] != NO_STEP)
            open[d->step[i]] = true;
    for (int32_t i = 0; i < STEPS; i++)
        if (!open[i])
            return i;
    return NO_STEP;
}

/* Opens a step over some sequences, now and then with one that must not be in it. */
static void begin(driver *d)
{
    kvleaf_seq handles[MODEL_SEQUENCES];
    int32_t seqs[MODEL_SEQUENCES], num_q[MODEL_SEQUENCES], n = 0, step = closed_step(d);
    bool careless = one_in(d, 6);
    if (step == NO_STEP)
        return;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        const model_sequence *s = &d->pair.m.sequences[i];
        int32_t most = (int32_t)(s->extended - s->committed);
        if (!s->live || choose(d, 2) == 0 || (!careless && (most == 0 || d->step[i] != NO_STEP)))
            continue;
        seqs[n] = i;
        handles[n] = d->pair.handles[i];
        num_q[n++] = choose(d, 3) ? most : 1 + choose(d, most);
    }
    pair_note(&d->pair, "begin step %d of %d sequences%s", step, n, careless ? ", careless" : "");
    kvleaf_status expected = model_begin(&d->pair.m, seqs, num_q, n);
    if (!answered(d, kvleaf_blocks_step_begin(d->pair.real, handles, num_q, n), expected))
        return;
    for (int32_t i = 0; i < n; i++)
        d->step[seqs[i]] = step;
    for (int32_t group = 0; group < d->pair.m.p.num_groups; group++)
        if (!careless)
            copy_blocks(d, group, -1);
}

/* The sequences of an open step. */
static int32_t members(const driver *d, int32_t step, int32_t *seqs, kvleaf_seq *handles)
{
    int32_t n = 0;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        if (!d->pair.m.sequences[i].live || d->step[i] != step)
            continue;
        handles[n] = d->pair.handles[i];
        seqs[n++] = i;
    }
    return n;
}

static void close_step(driver *d, int32_t step, bool commit)
{
    kvleaf_seq handles[MODEL_SEQUENCES];
    int32_t seqs[MODEL_SEQUENCES], accepted[MODEL_SEQUENCES], n = members(d, step, seqs, handles);
    bool all = choose(d, 3) != 0, careless = one_in(d, 12);
    for (int32_t i = 0; i < n; i++) {
        const model_sequence *s = &d->pair.m.sequences[seqs[i]];
        accepted[i] = choose(d, (int32_t)(s->planned - s->committed) + 1 + careless);
    }
    pair_note(&d->pair, "%s step %d of %d sequences%s", commit ? "commit" : "roll back", step, n,
              all ? "" : " in part");
    kvleaf_status expected, got;
    if (commit) {
        expected = model_commit(&d->pair.m, seqs, all ? NULL : accepted, n);
        got = kvleaf_blocks_step_commit(d->pair.real, handles, all ? NULL : accepted, n);
    } else {
        expected = model_rollback(&d->pair.m, seqs, n);
        got = kvleaf_blocks_step_rollback(d->pair.real, handles, n);
    }
    if (!answered(d, got, expected))
        return;
    for (int32_t i = 0; i < n; i++)
        d->step[seqs[i]] = NO_STEP;
}

static void commit(driver *d)
{
    close_step(d, choose(d, STEPS), true);
}

static void roll_back(driver *d)
{
    close_step(d, choose(d, STEPS), false);
}

/* Calls that must be refused whatever the state is. */
static void misuse(driver *d)
{
    kvleaf_tokens tokens = {.struct_size = sizeof tokens, .count = -1};
    kvleaf_blocks *real = d->pair.real;
    kvleaf_seq stale = d->destroyed, handle = 0;
    int32_t at = any_sequence(d), one = 1;
    pair_note(&d->pair, "misuse");
    if (at >= 0)
        answered(d, kvleaf_blocks_seq_extend(real, d->pair.handles[at], &tokens, NULL),
                 d->step[at] == NO_STEP ? KVLEAF_INVALID : KVLEAF_BUSY);
    tokens.count = 1;
    const struct {
        kvleaf_seq seq;
        kvleaf_status status;
    } wrong[] = {{0, KVLEAF_INVALID}, {d->foreign, KVLEAF_FOREIGN}, {stale, stale ? KVLEAF_STALE : KVLEAF_INVALID}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        handle = wrong[i].seq;
        answered(d, kvleaf_blocks_seq_extend(real, handle, &tokens, NULL), wrong[i].status);
        answered(d, kvleaf_blocks_seq_truncate(real, handle, 0), wrong[i].status);
        answered(d, kvleaf_blocks_step_begin(real, &handle, &one, 1), wrong[i].status);
        answered(d, kvleaf_blocks_step_commit(real, &handle, NULL, 1), wrong[i].status);
        answered(d, kvleaf_blocks_seq_fork(real, wrong[i].seq, 0, &handle), wrong[i].status);
        handle = wrong[i].seq;
        answered(d, kvleaf_blocks_seq_destroy(real, &handle), wrong[i].status);
    }
}

static const struct {
    void (*operate)(driver *d);
    int32_t weight;
} operations[] = {{create, 8}, {extend, 24}, {fork, 10},     {truncate, 5},  {destroy, 3},
                  {begin, 10}, {commit, 14}, {roll_back, 4}, {copy_some, 3}, {misuse, 1}};

bool driver_operate(driver *d)
{
    int32_t weights = 0, at = 0;
    if (d->bytes && d->left == 0)
        return false;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        weights += operations[i].weight;
    for (int32_t chosen = choose(d, weights); chosen >= operations[at].weight; at++)
        chosen -= operations[at].weight;
    if (d->failing)
        d->before = d->pair.m;
    operations[at].operate(d);
    pair_compare(&d->pair);
    return true;
}

static model_params params_of(driver *d, const driver_params *params)
{
    model_params p = {.block_size = params->block_size,
                      .max_sequences = MODEL_SEQUENCES,
                      .max_blocks_per_seq = params->max_blocks_per_seq ? params->max_blocks_per_seq : MODEL_BLOCKS,
                      .num_groups = params->num_groups};
    for (int32_t i = 0; i < p.num_groups; i++) {
        model_group_params *group = &p.groups[i];
        group->num_blocks = group->free_count = i == 0 ? MODEL_BLOCKS : MODEL_BLOCKS - 11 * i;
        group->window = params->windows[i];
        for (int32_t j = 0; j < group->num_blocks; j++) /* any order will do that is not the usual one */
            group->free_order[j] = (j * 7 + 3) % group->num_blocks;
    }
    (void)d;
    return p;
}

static void open_real(driver *d)
{
    const model_params *p = &d->pair.m.p;
    kvleaf_block_group groups[MODEL_GROUPS];
    kvleaf_blocks_params params = {.struct_size = sizeof params,
                                   .block_size = p->block_size,
                                   .max_sequences = p->max_sequences,
                                   .max_blocks_per_seq = p->max_blocks_per_seq,
                                   .allocator = {fickle_allocate, fickle_release, d},
                                   .groups = groups,
                                   .num_groups = p->num_groups,
                                   .no_prefix_cache = 1}; /* the model has none */
    for (int32_t i = 0; i < p->num_groups; i++)
        groups[i] = (kvleaf_block_group){.num_blocks = p->groups[i].num_blocks,
                                         .free_order = p->groups[i].free_order,
                                         .free_count = p->groups[i].free_count};
    if (kvleaf_blocks_create(&params, &d->pair.real) ||
        kvleaf_blocks_create(kvleaf_blocks_params(.num_blocks = 1), &d->other) ||
        kvleaf_blocks_seq_create(d->other, NULL, &d->foreign))
        pair_wrong(&d->pair, "the managers can't be made");
}

driver *driver_create(const driver_params *params, uint64_t seed, const uint8_t *bytes, size_t size)
{
    driver *d = calloc(1, sizeof *d);
    if (!d)
        abort();
    d->pair.seed = seed;
    d->random = seed * 0x9e3779b97f4a7c15u + 1;
    model_params p = params_of(d, params);
    model_init(&d->pair.m, &p);
    open_real(d);
    for (int32_t i = 0; i < PROMPTS; i++)
        for (int32_t j = 0; j < MODEL_TOKENS; j++)
            d->prompts[i][j] = (int32_t)(next_random(d) % WORDS);
    d->failing = params->failing;
    d->bytes = bytes;
    d->left = size;
    return d;
}

const kvleaf_blocks *driver_blocks(const driver *d)
{
    return d->pair.real;
}

void driver_destroy(driver *d, driver_tally *tally)
{
    d->bytes = NULL;
    d->failing = 0;
    for (int32_t step = 0; step < STEPS; step++)
        close_step(d, step, false);
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        if (!d->pair.m.sequences[i].live)
            continue;
        model_destroy(&d->pair.m, i);
        answered(d, kvleaf_blocks_seq_destroy(d->pair.real, &d->pair.handles[i]), KVLEAF_OK);
    }
    pair_compare(&d->pair);
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    if (kvleaf_blocks_query(d->pair.real, &stats) || stats.used + stats.pinned + stats.sequences > 0 ||
        stats.tokens + stats.slots_wasted > 0)
        pair_wrong(&d->pair, "something is left: %d used, %d pinned", stats.used, stats.pinned);
    d->tally.operations = d->pair.operations;
    if (tally) {
        for (int32_t i = 0; i < 16; i++)
            tally->statuses[i] += d->tally.statuses[i];
        tally->operations += d->tally.operations;
        tally->copies += d->tally.copies;
    }
    kvleaf_blocks_destroy(&d->pair.real);
    kvleaf_blocks_destroy(&d->other);
    free(d);
}
