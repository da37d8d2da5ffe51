/* SPDX-License-Identifier: Apache-2.0 */
/* A snapshot's front read, verified and taken apart, and its records. The bytes stay where they were read; arrays point
 * into them, turned into the machine's own numbers in place. */
#include "snapshot/format.h"

#include <assert.h>
#include <string.h>

/* Bytes of the description that a thing takes at least. */
enum { GROUP_BYTES = 48, LAYER_BYTES = 16, SEQ_BYTES = 48, ENTRY_BYTES = 48, CONTENT_BYTES = 24, MAX_BLOCK_SIZE = 256 };

static uint64_t load64(const unsigned char *bytes)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | bytes[i];
    return value;
}

static int32_t load32(const unsigned char *bytes)
{
    return (int32_t)((uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
                     (uint32_t)bytes[3] << 24);
}

/* The part of the description that is not taken apart yet, a multiple of 8 bytes at an address that is one. Taking more
 * than is there sets `cut` and gives zeros or NULL from then on. */
typedef struct cursor {
    unsigned char *at;
    uint64_t left;
    bool cut;
} cursor;

static unsigned char *take(cursor *c, uint64_t bytes)
{
    if (c->cut || bytes > c->left) {
        c->cut = true;
        return NULL;
    }
    unsigned char *at = c->at;
    c->at += bytes;
    c->left -= bytes;
    return at;
}

static uint64_t take64(cursor *c)
{
    const unsigned char *bytes = take(c, 8);
    return bytes ? load64(bytes) : 0;
}

/* count int32 and their padding. */
static int32_t *take_array(cursor *c, uint64_t count)
{
    unsigned char *bytes = count <= c->left / 4 ? take(c, (count + count % 2) * 4) : take(c, UINT64_MAX);
    int32_t *values = (int32_t *)(void *)bytes;
    for (uint64_t i = 0; values && i < count; i++)
        values[i] = load32(bytes + 4 * i);
    return values;
}

static_assert(sizeof(kvl_content) == CONTENT_BYTES, "contents are used where they were read");

static kvl_content *take_contents(cursor *c, uint64_t count)
{
    unsigned char *bytes = take(c, count <= c->left / CONTENT_BYTES ? count * CONTENT_BYTES : UINT64_MAX);
    kvl_content *contents = (kvl_content *)(void *)bytes;
    for (uint64_t i = 0; bytes && i < count; i++, bytes += CONTENT_BYTES)
        contents[i] = (kvl_content){.digest = {load64(bytes), load64(bytes + 8)}, .end = load32(bytes + 16)};
    return contents;
}

static kvleaf_status corrupt(const char *what)
{
    return kvl_fail(KVLEAF_CORRUPT, "path", 0, 0, "the snapshot %s", what);
}

static bool take_groups(cursor *c, const kvl_snapshot *s, kvl_snapshot_group *groups, int32_t *windows,
                        int32_t *records)
{
    for (int32_t i = 0; i < s->saved.num_groups; i++) {
        const int32_t *fields = take_array(c, 8);
        if (!fields)
            return false;
        groups[i] = (kvl_snapshot_group){
            .num_layers = fields[0],
            .num_heads = fields[1],
            .num_kv_heads = fields[2],
            .head_dim_k = fields[3],
            .head_dim_v = fields[4],
            .dtype = fields[5],
            .window = fields[6],
            .reserved = fields[7],
            .token_bytes = (int64_t)take64(c),
            .num_records = (int64_t)take64(c),
        };
        if (groups[i].window < 0 || groups[i].token_bytes < 1 || groups[i].num_records < 0 ||
            groups[i].num_records > INT32_MAX)
            return false;
        windows[i] = groups[i].window;
        records[i] = (int32_t)groups[i].num_records;
    }
    return true;
}

static bool take_layers(cursor *c, const kvl_snapshot *s, kvl_snapshot_layer *layers)
{
    for (int32_t i = 0; i < s->num_layers; i++) {
        const int32_t *fields = take_array(c, 4);
        if (!fields)
            return false;
        layers[i] = (kvl_snapshot_layer){
            .group = fields[0], .pool_layer = fields[1], .owns = fields[2], .softmax_scale = fields[3]};
    }
    return true;
}

/* Records of a group for columns 0 .. count-1 of a sequence of so many tokens: in range, and there from some column on,
 * at the latest from the one that the next token's window begins in. */
static bool check_records(const kvl_saved *saved, int32_t group, const int32_t *records, int64_t count, int64_t tokens)
{
    int64_t before = saved->windows[group] ? tokens + 1 - saved->windows[group] : 0;
    int64_t needed = before > 0 ? before / saved->block_size : 0, first = 0;
    while (first < count && first < needed && records[first] == KVLEAF_NO_BLOCK)
        first++;
    for (int64_t i = first; i < count; i++)
        if (records[i] < 0 || records[i] >= saved->num_records[group])
            return false;
    return true;
}

static bool take_seq(cursor *c, const kvl_saved *saved, kvl_saved_seq *seq)
{
    seq->user = take64(c);
    seq->salt = take64(c);
    seq->ttl_ms = take64(c);
    seq->tokens = (int64_t)take64(c);
    seq->known = (int64_t)take64(c);
    const int32_t *fields = take_array(c, 2);
    if (!fields || seq->tokens < 0 || seq->tokens > (int64_t)INT32_MAX * saved->block_size || seq->known < 0 ||
        seq->known > seq->tokens)
        return false;
    seq->priority = fields[0];
    seq->no_prefix = fields[1];
    int64_t columns = kvl_ceil_div(seq->tokens, saved->block_size);
    seq->ids = take_array(c, (uint64_t)seq->known);
    seq->content = take_contents(c, (uint64_t)columns);
    seq->records = c->cut ? NULL : take_array(c, (uint64_t)columns * (uint64_t)saved->num_groups);
    for (int32_t group = 0; seq->records && group < saved->num_groups; group++) {
        if (!check_records(saved, group, seq->records + group * columns, columns, seq->tokens))
            return false;
    }
    return seq->records != NULL;
}

static bool take_entry(cursor *c, const kvl_saved *saved, int32_t at, kvl_saved_entry *entry)
{
    entry->salt = take64(c);
    entry->ttl_ms = take64(c);
    const kvl_content *content = take_contents(c, 1);
    const int32_t *fields = take_array(c, 2);
    entry->ids = take_array(c, (uint64_t)saved->block_size);
    entry->records = take_array(c, (uint64_t)saved->num_groups);
    if (c->cut || fields[0] < KVL_NO_ENTRY || fields[0] >= at)
        return false;
    entry->content = *content;
    entry->parent = fields[0];
    entry->priority = fields[1];
    for (int32_t group = 0; group < saved->num_groups; group++) {
        if (entry->records[group] < KVLEAF_NO_BLOCK || entry->records[group] >= saved->num_records[group])
            return false;
    }
    return true;
}

/* NULL too where the address space is smaller. */
static void *allocate(const kvleaf_allocator *allocator, uint64_t bytes, kvleaf_status *status)
{
    void *memory = bytes <= SIZE_MAX / 2 ? kvl_alloc(allocator, 1, (size_t)bytes) : NULL;
    *status = memory ? KVLEAF_OK : kvl_fail_memory((size_t)bytes);
    return memory;
}

/* Memory for `count` of something of which each takes `least` bytes of the description at least. */
static void *part(kvl_snapshot *s, int at, const cursor *c, int32_t count, size_t least, size_t size,
                  kvleaf_status *status)
{
    if (*status)
        return NULL;
    if (count < 0 || (uint64_t)count > c->left / least) {
        *status = corrupt("counts more than it holds");
        return NULL;
    }
    s->parts[at] = allocate(&s->allocator, (uint64_t)count * size, status);
    return s->parts[at];
}

static kvleaf_status take_shape(cursor *c, kvl_snapshot *s)
{
    const int32_t *counts = take_array(c, 6);
    if (!counts || counts[0] < 1 || counts[0] > MAX_BLOCK_SIZE || counts[1] < 1)
        return corrupt("has a block size or a number of groups that is none");
    s->saved.block_size = counts[0];
    s->saved.num_groups = counts[1];
    s->num_layers = counts[2];
    s->saved.num_seqs = counts[3];
    s->saved.num_entries = counts[4];
    kvleaf_status status = KVLEAF_OK;
    kvl_snapshot_group *groups = part(s, 0, c, counts[1], GROUP_BYTES, sizeof *groups, &status);
    int32_t *numbers = part(s, 1, c, counts[1], GROUP_BYTES, 2 * sizeof *numbers, &status);
    kvl_snapshot_layer *layers = part(s, 2, c, counts[2], LAYER_BYTES, sizeof *layers, &status);
    if (status)
        return status;
    s->groups = groups;
    s->layers = layers;
    s->saved.windows = numbers;
    s->saved.num_records = numbers + counts[1];
    if (!take_groups(c, s, groups, numbers, numbers + counts[1]) || !take_layers(c, s, layers))
        return corrupt("has a group or layer that is none");
    uint64_t records;
    if (!kvl_snapshot_records_bytes(s, &records) || !kvl_add(records, s->front_bytes, &records) || records != s->bytes)
        return corrupt("has records of other sizes than it says");
    return KVLEAF_OK;
}

static kvleaf_status take_description(cursor *c, kvl_snapshot *s)
{
    kvleaf_status status = take_shape(c, s);
    kvl_saved_seq *seqs = part(s, 3, c, s->saved.num_seqs, SEQ_BYTES, sizeof *seqs, &status);
    for (int32_t i = 0; !status && i < s->saved.num_seqs; i++) {
        if (!take_seq(c, &s->saved, &seqs[i]))
            status = corrupt("has a sequence that contradicts itself");
    }
    kvl_saved_entry *entries = part(s, 4, c, s->saved.num_entries, ENTRY_BYTES, sizeof *entries, &status);
    for (int32_t i = 0; !status && i < s->saved.num_entries; i++) {
        if (!take_entry(c, &s->saved, i, &entries[i]))
            status = corrupt("has an index entry that contradicts itself");
    }
    if (!status && c->left > 0)
        status = corrupt("describes less than it holds");
    s->saved.seqs = seqs;
    s->saved.entries = entries;
    return status;
}

/* The head, on its own: what says how much more there is to read. */
static kvleaf_status check_head(const kvl_snapshot_source *source, const unsigned char *head, uint64_t *description)
{
    if (memcmp(head, KVL_SNAPSHOT_MAGIC, 8) != 0)
        return kvl_fail(KVLEAF_CORRUPT, "path", 0, 0, "the file is no snapshot");
    uint64_t bytes = load64(head + 16);
    *description = load64(head + 24);
    if (bytes != source->size)
        return kvl_fail(KVLEAF_CORRUPT, "path", (int64_t)source->size, (int64_t)bytes,
                        "the snapshot says that it has %llu bytes, the file has %llu", (unsigned long long)bytes,
                        (unsigned long long)source->size);
    if (*description % 8 || *description > bytes - KVL_SNAPSHOT_HEAD - KVL_SNAPSHOT_CHECKSUM)
        return corrupt("says that its description is longer than all of it");
    return KVLEAF_OK;
}

static kvleaf_status check_front(kvl_snapshot *s, const unsigned char *front)
{
    unsigned char checksum[KVL_SNAPSHOT_CHECKSUM];
    size_t sealed = (size_t)s->front_bytes - sizeof checksum;
    s->seed = kvl_snapshot_seal(front, sealed, checksum);
    if (memcmp(checksum, front + sealed, sizeof checksum) != 0)
        return corrupt("was altered: the checksum of its description is another");
    int32_t version = load32(front + 8);
    if (version != KVL_SNAPSHOT_VERSION)
        return kvl_fail(KVLEAF_UNSUPPORTED, "version", version, KVL_SNAPSHOT_VERSION,
                        "the snapshot is of version %d, this library reads %d", (int)version, KVL_SNAPSHOT_VERSION);
    return KVLEAF_OK;
}

kvleaf_status kvl_snapshot_read(const kvleaf_allocator *allocator, const kvl_snapshot_source *source, kvl_snapshot *out)
{
    unsigned char head[KVL_SNAPSHOT_HEAD];
    uint64_t description = 0;
    *out = (kvl_snapshot){.bytes = source->size};
    if (allocator)
        out->allocator = *allocator;
    if (source->size < KVL_SNAPSHOT_HEAD + KVL_SNAPSHOT_CHECKSUM)
        return kvl_fail(KVLEAF_CORRUPT, "path", (int64_t)source->size, KVL_SNAPSHOT_HEAD + KVL_SNAPSHOT_CHECKSUM,
                        "the file has %llu bytes, too few for a snapshot", (unsigned long long)source->size);
    if (!source->read(source->user, 0, head, sizeof head))
        return corrupt("can't be read");
    kvleaf_status status = check_head(source, head, &description);
    if (status)
        return status;
    out->front_bytes = KVL_SNAPSHOT_HEAD + description + KVL_SNAPSHOT_CHECKSUM;
    unsigned char *front = allocate(&out->allocator, out->front_bytes, &status);
    if (status)
        return status;
    out->parts[5] = front;
    if (!source->read(source->user, 0, front, (size_t)out->front_bytes))
        status = corrupt("can't be read");
    if (!status)
        status = check_front(out, front);
    cursor c = {.at = front + KVL_SNAPSHOT_HEAD, .left = description};
    if (!status)
        status = take_description(&c, out);
    if (status)
        kvl_snapshot_free(out);
    return status;
}

void kvl_snapshot_free(kvl_snapshot *snapshot)
{
    for (size_t i = 0; i < sizeof snapshot->parts / sizeof *snapshot->parts; i++)
        kvl_free(&snapshot->allocator, snapshot->parts[i]);
    *snapshot = (kvl_snapshot){0};
}

kvleaf_status kvl_snapshot_read_record(const kvl_snapshot *snapshot, const kvl_snapshot_source *source, int32_t group,
                                       int32_t record, void *data)
{
    uint64_t bytes = kvl_snapshot_record_bytes(snapshot, group), offset = snapshot->front_bytes;
    for (int32_t i = 0; i < group; i++)
        offset += (kvl_snapshot_record_bytes(snapshot, i) + KVL_SNAPSHOT_CHECKSUM) *
                  (uint64_t)snapshot->groups[i].num_records;
    offset += (bytes + KVL_SNAPSHOT_CHECKSUM) * (uint64_t)record;
    unsigned char checksum[KVL_SNAPSHOT_CHECKSUM];
    if (!source->read(source->user, offset, data, (size_t)bytes + sizeof checksum))
        return corrupt("can't be read");
    kvl_snapshot_checksum(snapshot, group, record, data, checksum);
    if (memcmp(checksum, (const unsigned char *)data + bytes, sizeof checksum) != 0)
        return kvl_fail(KVLEAF_CORRUPT, "path", record, snapshot->groups[group].num_records,
                        "the snapshot was altered: the checksum of block %d of group %d is another", (int)record,
                        (int)group);
    return KVLEAF_OK;
}

kvleaf_status kvl_snapshot_verify(const kvl_snapshot *snapshot, const kvl_snapshot_source *source)
{
    uint64_t most = 0;
    for (int32_t i = 0; i < snapshot->saved.num_groups; i++) {
        uint64_t bytes = snapshot->groups[i].num_records ? kvl_snapshot_record_bytes(snapshot, i) : 0;
        most = bytes > most ? bytes : most;
    }
    kvleaf_status status;
    void *data = allocate(&snapshot->allocator, most + KVL_SNAPSHOT_CHECKSUM, &status);
    if (status)
        return status;
    for (int32_t group = 0; group < snapshot->saved.num_groups; group++) {
        for (int32_t record = 0; !status && record < snapshot->saved.num_records[group]; record++)
            status = kvl_snapshot_read_record(snapshot, source, group, record, data);
    }
    kvl_free(&snapshot->allocator, data);
    return status;
}
