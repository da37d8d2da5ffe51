/* SPDX-License-Identifier: Apache-2.0 */
#include "blocks_operations.h"

#include <stdlib.h>
#include <string.h>

static uint32_t next_random(driver *d)
{
    d->random ^= d->random << 13;
    d->random ^= d->random >> 7;
    d->random ^= d->random << 17;
    return (uint32_t)(d->random >> 32);
}

/* A number below n. */
int32_t driver_choose(driver *d, int32_t n)
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

bool driver_one_in(driver *d, int32_t n)
{
    return driver_choose(d, n) == n - 1;
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

static uint64_t now(void *user)
{
    driver *d = user;
    return d->pair.m.now_ms;
}

static bool same_hash(const uint64_t a[2], const uint64_t b[2])
{
    return a[0] == b[0] && a[1] == b[1];
}

/* Whether a block of the primary group is stored whose hash, or whose parent's, is this. */
static bool is_told(const driver *d, const uint64_t hash[2], bool as_parent)
{
    int32_t group = d->pair.m.primary;
    for (int32_t block = 0; block < MODEL_BLOCKS; block++)
        if (d->found[group][block] && same_hash(as_parent ? d->parents[block] : d->hashes[block], hash))
            return true;
    return false;
}

/* A block enters the index once and leaves it once, a parent before what continues it, and after. */
static void take_note(void *user, const kvleaf_event *event)
{
    static const uint64_t none[2] = {0, 0};
    driver *d = user;
    if (event->type == KVLEAF_EVENT_CLEARED) {
        memset(d->found, 0, sizeof d->found);
        return;
    }
    bool stored = event->type == KVLEAF_EVENT_STORED, *found = &d->found[event->group][event->block];
    if (*found == stored || (stored && (!event->ids || event->count != d->pair.m.p.block_size)))
        pair_wrong(&d->pair, "an event that block %d of group %d is %s", event->block, event->group,
                   stored ? "stored" : "removed");
    *found = stored;
    if (event->group != d->pair.m.primary || d->pair.real->index.one_hash)
        return;
    bool right = stored ? same_hash(event->parent, none) || is_told(d, event->parent, false)
                        : same_hash(event->hash, d->hashes[event->block]) && !is_told(d, event->hash, true);
    if (!right)
        pair_wrong(&d->pair, "block %d is %s out of turn", event->block, stored ? "stored" : "removed");
    memcpy(d->hashes[event->block], event->hash, sizeof event->hash);
    memcpy(d->parents[event->block], event->parent, sizeof event->parent);
}

static void note_added(void *user, const kvleaf_cached_block *block)
{
    driver *d = user;
    if (d->cached[block->group][block->block])
        pair_wrong(&d->pair, "the policy is told twice of block %d of group %d", block->block, block->group);
    d->cached[block->group][block->block] = true;
    d->priority[block->group][block->block] = block->priority;
}

static void note_removed(void *user, int32_t group, int32_t block)
{
    driver *d = user;
    if (!d->cached[group][block])
        pair_wrong(&d->pair, "the policy was not told of block %d of group %d, which is removed", block, group);
    d->cached[group][block] = false;
}

static int32_t choose_victim(void *user, int32_t group)
{
    const driver *d = user;
    int32_t block = MODEL_BLOCKS - 1;
    while (block > 0 && !d->cached[group][block])
        block--;
    return model_policy_knows(block) ? block : MODEL_BLOCKS + block;
}

static void compare_policy(const driver *d)
{
    for (int32_t group = 0; group < d->pair.m.p.num_groups; group++) {
        const model_group *g = &d->pair.m.groups[group];
        int32_t told = 0;
        for (int32_t block = 0; block < MODEL_BLOCKS; block++)
            told += d->cached[group][block];
        for (int32_t i = 0; i < g->cached.count; i++)
            if (!d->cached[group][g->cached.blocks[i]] ||
                d->priority[group][g->cached.blocks[i]] != g->priority[g->cached.blocks[i]])
                pair_wrong(&d->pair, "the policy was not told rightly of block %d of group %d", g->cached.blocks[i],
                           group);
        if (told != g->cached.count)
            pair_wrong(&d->pair, "the policy knows %d cached blocks of group %d, not %d", told, group, g->cached.count);
    }
}

static void compare_events(const driver *d)
{
    for (int32_t group = 0; group < d->pair.m.p.num_groups; group++)
        for (int32_t block = 0; block < d->pair.m.p.groups[group].num_blocks; block++)
            if (d->found[group][block] != (model_entry_of(&d->pair.m, group, block) != MODEL_NONE))
                pair_wrong(&d->pair, "events say that block %d of group %d is %s", block, group,
                           d->found[group][block] ? "stored" : "not stored");
}

/* Compares an answer with the model's. False where nothing has happened, also because memory ran out. */
bool driver_answered(driver *d, kvleaf_status got, kvleaf_status expected)
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
int32_t driver_sequence(driver *d)
{
    int32_t live[MODEL_SEQUENCES], n = 0;
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++)
        if (d->pair.m.sequences[i].live)
            live[n++] = i;
    return n ? live[driver_choose(d, n)] : -1;
}

static const struct {
    void (*operate)(driver *d);
    int32_t weight;
} operations[] = {
    {operate_create, 10}, {operate_extend, 24},   {operate_fork, 10},     {operate_truncate, 5}, {operate_destroy, 8},
    {operate_begin, 12},  {operate_commit, 16},   {operate_roll_back, 3}, {operate_match, 3},    {operate_set_ids, 4},
    {operate_pin, 2},     {operate_unpin, 3},     {operate_wait, 3},      {operate_clear, 1},    {operate_copy_some, 3},
    {operate_misuse, 1},  {operate_rearrange, 4}, {operate_swap_out, 5},  {operate_swap_in, 6},
};

bool driver_operate(driver *d)
{
    int32_t weights = 0, at = 0;
    if (d->bytes && d->left == 0)
        return false;
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
        weights += operations[i].weight;
    for (int32_t chosen = driver_choose(d, weights); chosen >= operations[at].weight; at++)
        chosen -= operations[at].weight;
    if (d->failing)
        d->before = d->pair.m;
    operations[at].operate(d);
    d->tally.operations++;
    pair_compare(&d->pair);
    compare_events(d);
    if (d->pair.m.p.policy)
        compare_policy(d);
    return true;
}

static model_params params_of(const driver_params *params)
{
    model_params p = {.block_size = params->block_size,
                      .max_sequences = MODEL_SEQUENCES,
                      .max_blocks_per_seq = params->max_blocks_per_seq ? params->max_blocks_per_seq : MODEL_BLOCKS,
                      .num_groups = params->num_groups,
                      .no_prefix_cache = params->no_prefix_cache,
                      .policy = params->policy};
    for (int32_t i = 0; i < p.num_groups; i++) {
        model_group_params *group = &p.groups[i];
        group->num_blocks = i == 0 ? MODEL_BLOCKS : MODEL_BLOCKS - 11 * i;
        group->window = params->windows[i];
        group->swap_blocks = params->swap_blocks;
        for (int32_t j = 0; j < group->num_blocks; j++) /* any order will do that is not the usual one */
            group->free_order[j] = (j * 7 + 3) % group->num_blocks;
    }
    return p;
}

static void open_real(driver *d)
{
    const model_params *p = &d->pair.m.p;
    const kvleaf_eviction eviction = {d, note_added, note_removed, choose_victim};
    kvleaf_block_group groups[MODEL_GROUPS];
    kvleaf_blocks_params params = {.struct_size = sizeof params,
                                   .block_size = p->block_size,
                                   .max_sequences = p->max_sequences,
                                   .max_blocks_per_seq = p->max_blocks_per_seq,
                                   .allocator = {fickle_allocate, fickle_release, d},
                                   .groups = groups,
                                   .num_groups = p->num_groups,
                                   .no_prefix_cache = p->no_prefix_cache,
                                   .eviction = p->policy ? &eviction : NULL,
                                   .event = take_note,
                                   .event_user = d,
                                   .now_ms = now,
                                   .now_user = d};
    for (int32_t i = 0; i < p->num_groups; i++)
        groups[i] = (kvleaf_block_group){.num_blocks = p->groups[i].num_blocks,
                                         .window = p->groups[i].window,
                                         .swap_blocks = p->groups[i].swap_blocks,
                                         .free_order = p->groups[i].free_order,
                                         .free_count = p->groups[i].num_blocks};
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
    model_params p = params_of(params);
    model_init(&d->pair.m, &p);
    open_real(d);
    d->pair.real->index.one_hash = params->one_hash;
    for (int32_t i = 0; i < PROMPTS; i++)
        for (int32_t j = 0; j < MODEL_TOKENS; j++)
            d->prompts[i][j] = (int32_t)(next_random(d) % WORDS);
    d->failing = params->failing;
    d->stray = params->stray ? params->stray : 200;
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
    for (int32_t group = 0; group < d->pair.m.p.num_groups; group++)
        for (int32_t block = 0; block < d->pair.m.p.groups[group].num_blocks; block++)
            while (model_unpin(&d->pair.m, group, block) == KVLEAF_OK)
                driver_answered(d, kvleaf_blocks_unpin(d->pair.real, group, block), KVLEAF_OK);
    for (int32_t step = 0; step < STEPS; step++)
        driver_close_step(d, step, false);
    for (int32_t i = 0; i < MODEL_SEQUENCES; i++) {
        if (!d->pair.m.sequences[i].live)
            continue;
        model_destroy(&d->pair.m, i);
        driver_answered(d, kvleaf_blocks_seq_destroy(d->pair.real, &d->pair.handles[i]), KVLEAF_OK);
    }
    pair_compare(&d->pair);
    kvleaf_blocks_stats stats = {.struct_size = sizeof stats};
    if (kvleaf_blocks_query(d->pair.real, &stats) || stats.used > 0 || stats.sequences > 0 ||
        stats.tokens + stats.slots_wasted > 0)
        pair_wrong(&d->pair, "something is left: %d used, %d pinned", stats.used, stats.pinned);
    if (tally) {
        for (int32_t i = 0; i < 16; i++)
            tally->statuses[i] += d->tally.statuses[i];
        tally->operations += d->tally.operations;
        tally->copies += d->tally.copies;
        tally->hits += d->tally.hits;
        tally->swaps += d->tally.swaps;
        tally->swapped_blocks += d->tally.swapped_blocks;
        tally->partial_hits += d->tally.partial_hits;
        tally->evictions += (int64_t)stats.evictions;
    }
    kvleaf_blocks_destroy(&d->pair.real);
    kvleaf_blocks_destroy(&d->other);
    free(d);
}
