/* SPDX-License-Identifier: Apache-2.0 */
/* Saving a cache's sequences and prefix index to a file, and loading them. */
#include <kvleaf/snapshot.h>

#include "cache/cache.h"
#include "snapshot/format.h"

#include <string.h>

#define BATCH_BYTES (8 << 20) /* of records that are moved at once, if one is not larger */

/* Records of a group on their way between its pool and the file. */
typedef struct batch {
    kvleaf_cache *cache;
    const kvl_snapshot *snapshot;
    kvleaf_exec exec;     /* without an event to give */
    const kvl_save *save; /* where the file is written */
    kvl_file *file;
    const kvl_load *load; /* where it is read */
    const kvl_snapshot_source *source;
    int32_t group, most;
    size_t part;           /* bytes of a record in one layer, K or V */
    size_t parts;          /* of a record */
    unsigned char *rows;   /* [parts][records of the batch][part]: as the pool gives and takes them */
    unsigned char *record; /* [parts][part] and its checksum */
    int32_t *table;        /* [most] blocks that the rows go to */
} batch;

static kvleaf_status open_batch(batch *b, int32_t group)
{
    const kvleaf_allocator *allocator = &b->cache->device->allocator;
    const kvl_snapshot_group *of = &b->snapshot->groups[group];
    uint64_t bytes = kvl_snapshot_record_bytes(b->snapshot, group), most = BATCH_BYTES / bytes;
    most = most > (uint64_t)of->num_records ? (uint64_t)of->num_records : most;
    b->group = group;
    b->most = most > 0 ? (int32_t)most : 1;
    b->parts = 2 * (size_t)of->num_layers;
    b->part = (size_t)bytes / b->parts;
    b->rows = kvl_alloc(allocator, (size_t)b->most, (size_t)bytes);
    b->record = kvl_alloc(allocator, 1, (size_t)bytes + KVL_SNAPSHOT_CHECKSUM);
    b->table = kvl_alloc(allocator, (size_t)b->most, sizeof *b->table);
    return b->rows && b->record && b->table ? KVLEAF_OK : kvl_fail_memory((size_t)b->most * (size_t)bytes);
}

static void close_batch(batch *b)
{
    const kvleaf_allocator *allocator = &b->cache->device->allocator;
    kvl_free(allocator, b->rows);
    kvl_free(allocator, b->record);
    kvl_free(allocator, b->table);
    b->rows = b->record = NULL;
    b->table = NULL;
}

/* Record `at` of a batch of `count`: from the rows, or to them. */
static void move_record(const batch *b, int32_t at, int32_t count, bool to_rows)
{
    for (size_t i = 0; i < b->parts; i++) {
        unsigned char *rows = b->rows + (i * (size_t)count + (size_t)at) * b->part, *record = b->record + i * b->part;
        memcpy(to_rows ? rows : record, to_rows ? record : rows, b->part);
    }
}

/* Zeros where the record has no token. */
static void clear_unused(const batch *b, int32_t tokens)
{
    size_t used = b->part / (size_t)b->cache->block_size * (size_t)tokens;
    for (size_t i = 0; i < b->parts; i++)
        memset(b->record + i * b->part + used, 0, b->part - used);
}

/* Groups and layers as the file tells them, in one array each; the caller frees both. */
static kvleaf_status describe_cache(const kvleaf_cache *cache, kvl_snapshot_group **groups, kvl_snapshot_layer **layers)
{
    const kvleaf_allocator *allocator = &cache->device->allocator;
    *groups = kvl_alloc(allocator, (size_t)cache->num_groups, sizeof **groups);
    *layers = kvl_alloc(allocator, (size_t)cache->num_layers, sizeof **layers);
    if (!*groups || !*layers)
        return kvl_fail_memory((size_t)cache->num_layers * sizeof **layers);
    for (int32_t i = 0; i < cache->num_groups; i++) {
        const kvl_geometry *geometry = &cache->groups[i].geometry;
        (*groups)[i] = (kvl_snapshot_group){
            .num_layers = cache->groups[i].num_layers,
            .num_heads = geometry->num_heads,
            .num_kv_heads = geometry->num_kv_heads,
            .head_dim_k = geometry->head_dim,
            .head_dim_v = geometry->head_dim,
            .dtype = geometry->kv_dtype,
            .window = geometry->window,
            .token_bytes = (int64_t)kvl_pool_rows_bytes(cache->groups[i].pool, 1),
        };
    }
    for (int32_t i = 0; i < cache->num_layers; i++) {
        const kvl_cache_layer *layer = &cache->layers[i];
        (*layers)[i] =
            (kvl_snapshot_layer){.group = layer->group, .pool_layer = layer->pool_layer, .owns = layer->owns};
        memcpy(&(*layers)[i].softmax_scale, &layer->softmax_scale, sizeof layer->softmax_scale);
    }
    return KVLEAF_OK;
}

static void free_description(const kvleaf_cache *cache, kvl_snapshot_group *groups, kvl_snapshot_layer *layers)
{
    kvl_free(&cache->device->allocator, groups);
    kvl_free(&cache->device->allocator, layers);
}

static kvleaf_status check_call(const kvleaf_cache *cache, const char *path, const kvleaf_exec *exec)
{
    if (!cache)
        return kvl_fail_null("cache");
    if (!path)
        return kvl_fail_null("path");
    return kvl_check_exec(cache->device, exec);
}

/* The calls inside give no event; where one is asked for, it comes behind them all. */
static kvleaf_status give_event(kvleaf_cache *cache, const kvleaf_exec *exec)
{
    kvl_tail_call call;
    if (!exec->event_out)
        return KVLEAF_OK;
    kvleaf_status status = kvl_tail_begin(&cache->tail, exec, &call);
    return status ? status : kvl_tail_end(&call, KVLEAF_OK);
}

static kvleaf_status fail_write(void)
{
    return kvl_fail(KVLEAF_INVALID, "path", 0, 0, "the file can't be written whole");
}

/* Moves the records of every group that has some. */
static kvleaf_status move_groups(batch *b, kvleaf_status (*move)(batch *b), const kvleaf_exec *exec)
{
    b->exec = *exec;
    b->exec.event_out = NULL;
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0; !status && i < b->cache->num_groups; i++) {
        if (b->snapshot->saved.num_records[i] == 0)
            continue;
        status = open_batch(b, i);
        if (!status)
            status = move(b);
        close_batch(b);
    }
    return status ? status : give_event(b->cache, exec);
}

static kvleaf_status write_group(batch *b)
{
    int32_t total = b->snapshot->saved.num_records[b->group];
    unsigned char *checksum = b->record + b->parts * b->part;
    for (int32_t first = 0, count; first < total; first += count) {
        count = b->most < total - first ? b->most : total - first;
        const kvl_rows rows = {.table = b->save->blocks[b->group] + first,
                               .count = (int64_t)count * b->cache->block_size};
        kvleaf_status status = kvl_cache_read_rows(b->cache, b->group, &rows, b->rows, &b->exec);
        if (status)
            return status;
        for (int32_t i = 0; i < count; i++) {
            move_record(b, i, count, false);
            clear_unused(b, b->save->tokens[b->group][first + i]);
            kvl_snapshot_checksum(b->snapshot, b->group, first + i, b->record, checksum);
            if (!kvl_file_write(b->file, b->record, b->parts * b->part + KVL_SNAPSHOT_CHECKSUM))
                return fail_write();
        }
    }
    return KVLEAF_OK;
}

static kvleaf_status write_file(kvleaf_cache *cache, const char *path, kvl_snapshot *snapshot, const kvl_save *save,
                                const kvleaf_exec *exec)
{
    kvl_text front = {.allocator = &cache->device->allocator};
    kvl_file *file = NULL;
    kvleaf_status status = kvl_snapshot_write_front(snapshot, &front);
    if (!status)
        status = kvl_file_create(&cache->device->allocator, path, &file);
    if (!status && !kvl_file_write(file, front.data, front.size))
        status = fail_write();
    kvl_text_free(&front);
    if (!status) {
        batch b = {.cache = cache, .snapshot = snapshot, .save = save, .file = file};
        status = move_groups(&b, write_group, exec);
    }
    bool kept = kvl_file_close(file, !status);
    return status || kept ? status : fail_write();
}

static kvleaf_status check_save(const kvleaf_snapshot_params *params)
{
    kvleaf_status status =
        kvl_check_struct(params, params ? params->struct_size : 0, sizeof *params, "kvleaf_snapshot_params");
    if (status)
        return status;
    if (params->num_seqs < 0)
        return kvl_fail_range("num_seqs", params->num_seqs, 0, INT32_MAX);
    if (params->num_seqs > 0 && !params->seqs)
        return kvl_fail_null("seqs");
    return params->prefix_cache == 0 || params->prefix_cache == 1
               ? KVLEAF_OK
               : kvl_fail_range("prefix_cache", params->prefix_cache, 0, 1);
}

kvleaf_status kvleaf_snapshot_save(kvleaf_cache *cache, const char *path, const kvleaf_snapshot_params *params,
                                   const kvleaf_exec *exec)
{
    kvl_save save;
    kvleaf_status status = check_call(cache, path, exec);
    if (!status)
        status = check_save(params);
    if (!status)
        status = kvl_tail_check(&cache->tail);
    if (!status)
        status = kvl_save_begin(cache->blocks, params->seqs, params->num_seqs, params->prefix_cache, &save);
    if (status)
        return status;
    kvl_snapshot_group *groups = NULL;
    kvl_snapshot_layer *layers = NULL;
    status = describe_cache(cache, &groups, &layers);
    if (!status) {
        for (int32_t i = 0; i < cache->num_groups; i++)
            groups[i].num_records = save.saved.num_records[i];
        kvl_snapshot snapshot = {
            .saved = save.saved, .num_layers = cache->num_layers, .groups = groups, .layers = layers};
        status = write_file(cache, path, &snapshot, &save, exec);
    }
    free_description(cache, groups, layers);
    kvl_save_free(cache->blocks, &save);
    return status;
}

static bool read_file(void *user, uint64_t offset, void *data, size_t size)
{
    return kvl_file_read_at(user, offset, data, size);
}

/* Opens a file and verifies all of it. What is open is closed where this fails. */
static kvleaf_status open_snapshot(const kvleaf_allocator *allocator, const char *path, kvl_snapshot_source *source,
                                   kvl_snapshot *snapshot)
{
    kvl_file *file = NULL;
    *source = (kvl_snapshot_source){.read = read_file};
    kvleaf_status status = kvl_file_open(allocator, path, &file, &source->size);
    if (status)
        return status;
    source->user = file;
    status = kvl_snapshot_read(allocator, source, snapshot);
    if (!status) {
        status = kvl_snapshot_verify(snapshot, source);
        if (status)
            kvl_snapshot_free(snapshot);
    }
    if (status)
        kvl_file_close(file, false);
    return status;
}

static void close_snapshot(kvl_snapshot_source *source, kvl_snapshot *snapshot)
{
    kvl_snapshot_free(snapshot);
    kvl_file_close(source->user, false);
}

/* Whether the file is of a cache like this one: what decides which numbers K and V are. */
static kvleaf_status compare(const kvl_snapshot *snapshot, const kvleaf_cache *cache, const kvl_snapshot_group *groups,
                             const kvl_snapshot_layer *layers)
{
    const struct {
        const char *field;
        int32_t there, here;
    } counts[] = {
        {"block_size", snapshot->saved.block_size, cache->block_size},
        {"num_groups", snapshot->saved.num_groups, cache->num_groups},
        {"num_layers", snapshot->num_layers, cache->num_layers},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        if (counts[i].there != counts[i].here)
            return kvl_fail(KVLEAF_FOREIGN, counts[i].field, counts[i].there, counts[i].here,
                            "the snapshot's %s is %d, the cache's %d", counts[i].field, (int)counts[i].there,
                            (int)counts[i].here);
    }
    for (int32_t i = 0; i < cache->num_groups; i++) {
        kvl_snapshot_group there = snapshot->groups[i];
        there.num_records = 0;
        if (memcmp(&there, &groups[i], sizeof there) != 0)
            return kvl_fail(
                KVLEAF_FOREIGN, "groups", i, 0,
                "the snapshot's group %d has other heads, head_dim, dtype, layers or window than the cache's", (int)i);
    }
    for (int32_t i = 0; i < cache->num_layers; i++) {
        if (memcmp(&snapshot->layers[i], &layers[i], sizeof *layers) != 0)
            return kvl_fail(KVLEAF_FOREIGN, "layers", i, 0, "the snapshot's layer %d is another than the cache's",
                            (int)i);
    }
    return KVLEAF_OK;
}

static kvleaf_status check_foreign(const kvl_snapshot *snapshot, const kvleaf_cache *cache)
{
    kvl_snapshot_group *groups = NULL;
    kvl_snapshot_layer *layers = NULL;
    kvleaf_status status = describe_cache(cache, &groups, &layers);
    if (!status)
        status = compare(snapshot, cache, groups, layers);
    free_description(cache, groups, layers);
    return status;
}

/* Reads the records that need a block of their own, and writes those blocks. */
static kvleaf_status read_group(batch *b)
{
    const kvl_load_record *records = b->load->records[b->group];
    int32_t total = b->snapshot->saved.num_records[b->group];
    for (int32_t next = 0; next < total;) {
        int32_t first = next, count = 0, at = 0;
        for (; next < total && count < b->most; next++)
            if (records[next].fill)
                b->table[count++] = records[next].block;
        for (int32_t i = first; i < next; i++) {
            if (!records[i].fill)
                continue;
            kvleaf_status status = kvl_snapshot_read_record(b->snapshot, b->source, b->group, i, b->record);
            if (status)
                return status;
            move_record(b, at++, count, true);
        }
        const kvl_rows rows = {.table = b->table, .count = (int64_t)count * b->cache->block_size};
        kvleaf_status status = kvl_cache_write_rows(b->cache, b->group, &rows, 0, b->rows, &b->exec);
        if (status)
            return status;
    }
    return KVLEAF_OK;
}

/* Takes the blocks, fills them, and lets the manager have what was saved. */
static kvleaf_status load_into(kvleaf_cache *cache, const kvl_snapshot *snapshot, const kvl_snapshot_source *source,
                               kvleaf_seq *seqs, const kvleaf_exec *exec)
{
    kvl_load load;
    kvleaf_status status = kvl_load_begin(cache->blocks, &snapshot->saved, seqs, &load);
    if (status)
        return status;
    batch b = {.cache = cache, .snapshot = snapshot, .load = &load, .source = source};
    status = move_groups(&b, read_group, exec);
    kvl_load_end(cache->blocks, &snapshot->saved, &load, seqs, !status);
    return status;
}

static kvleaf_status check_load(const kvl_snapshot *snapshot, const kvleaf_seq *seqs, int32_t capacity, int32_t *count)
{
    int32_t num_seqs = snapshot->saved.num_seqs;
    *count = num_seqs;
    if (capacity < num_seqs)
        return kvl_fail(KVLEAF_TOO_SMALL, "capacity", capacity, num_seqs,
                        "capacity is %d, the snapshot has %d sequences", (int)capacity, (int)num_seqs);
    return num_seqs > 0 && !seqs ? kvl_fail_null("seqs") : KVLEAF_OK;
}

kvleaf_status kvleaf_snapshot_load(kvleaf_cache *cache, const char *path, kvleaf_seq *seqs, int32_t capacity,
                                   int32_t *count, const kvleaf_exec *exec)
{
    kvleaf_status status = check_call(cache, path, exec);
    if (status)
        return status;
    if (!count)
        return kvl_fail_null("count");
    if (capacity < 0)
        return kvl_fail_range("capacity", capacity, 0, INT32_MAX);
    status = kvl_tail_check(&cache->tail);
    if (status)
        return status;
    const kvleaf_allocator *allocator = &cache->device->allocator;
    kvl_snapshot snapshot;
    kvl_snapshot_source source;
    status = open_snapshot(allocator, path, &source, &snapshot);
    if (status)
        return status;
    status = check_foreign(&snapshot, cache);
    if (!status)
        status = check_load(&snapshot, seqs, capacity, count);
    kvleaf_seq *loaded = kvl_alloc(allocator, (size_t)snapshot.saved.num_seqs, sizeof *loaded);
    if (!status && !loaded)
        status = kvl_fail_memory((size_t)snapshot.saved.num_seqs * sizeof *loaded);
    if (!status)
        status = load_into(cache, &snapshot, &source, loaded, exec);
    for (int32_t i = 0; !status && i < snapshot.saved.num_seqs; i++)
        seqs[i] = loaded[i];
    kvl_free(allocator, loaded);
    close_snapshot(&source, &snapshot);
    return status;
}

kvleaf_status kvleaf_snapshot_inspect(const char *path, kvleaf_snapshot_info *info)
{
    if (!path)
        return kvl_fail_null("path");
    kvleaf_status status = kvl_check_struct(info, info ? info->struct_size : 0, sizeof *info, "kvleaf_snapshot_info");
    kvl_snapshot snapshot;
    kvl_snapshot_source source;
    const kvleaf_allocator allocator = {0};
    if (!status)
        status = open_snapshot(&allocator, path, &source, &snapshot);
    if (status)
        return status;
    info->version = KVL_SNAPSHOT_VERSION;
    info->block_size = snapshot.saved.block_size;
    info->num_groups = snapshot.saved.num_groups;
    info->num_layers = snapshot.num_layers;
    info->num_seqs = snapshot.saved.num_seqs;
    info->num_blocks = 0;
    for (int32_t i = 0; i < snapshot.saved.num_groups; i++)
        info->num_blocks += snapshot.saved.num_records[i];
    info->num_indexed = snapshot.saved.num_entries;
    info->bytes = snapshot.bytes;
    close_snapshot(&source, &snapshot);
    return KVLEAF_OK;
}
