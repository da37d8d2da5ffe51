/* SPDX-License-Identifier: Apache-2.0 */
/* Protects a cache, and the file that was there before, from what goes wrong with a snapshot: a file that is cut or
 * altered, one of another cache, a disk that is full, and every allocation and every OpenCL call failing in turn. */
#define _XOPEN_SOURCE 700
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <kvleaf/snapshot.h>

#include "rig.h"
#include "shim.h"
#include "snapshot/format.h"
#include "stats.h"

static rig_params tiny(void)
{
    rig_params p = rig_defaults();
    p.num_layers = 1;
    p.num_heads = p.num_kv_heads = 1;
    p.head_dim = 1;
    p.block_size = 2;
    p.num_blocks = 12;
    p.no_plan = true;
    return p;
}

static void add(rig *r, rig_seq *seq, int32_t first, int32_t count)
{
    int32_t tokens[64], start = seq->extended;
    for (int32_t i = 0; i < count; i++)
        tokens[i] = first + i;
    rig_extend_with(r, seq, tokens, count);
    uint64_t size;
    uint8_t *bytes = rig_rows(r, seq, start, count, &size);
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    ASSERT_OK(kvleaf_seq_import(r->cache, seq->seq, start, count, bytes, size, &exec));
    seq->committed = seq->extended;
    free(bytes);
}

static kvleaf_status save(rig *r, const char *path, const kvleaf_seq *seqs, int32_t n)
{
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    const kvleaf_snapshot_params params = {
        .struct_size = sizeof params, .seqs = seqs, .num_seqs = n, .prefix_cache = 1};
    return kvleaf_snapshot_save(r->cache, path, &params, &exec);
}

static kvleaf_status load(rig *r, const char *path, kvleaf_seq *seqs, int32_t capacity)
{
    const kvleaf_exec exec = rig_exec(r, &(rig_step){0});
    int32_t count = -1;
    return kvleaf_snapshot_load(r->cache, path, seqs, capacity, &count, &exec);
}

/* A file of one sequence of five tokens; malloc'ed, its size in *size. */
static char *make_file(const rig_params *p, const char *path, size_t *size)
{
    rig r;
    rig_open(&r, p);
    rig_seq *seq = rig_seq_new(&r);
    add(&r, seq, 100, 5);
    ASSERT_OK(save(&r, path, &seq->seq, 1));
    rig_close(&r);
    return support_slurp(path, size);
}

static bool read_bytes(void *user, uint64_t offset, void *data, size_t size)
{
    memcpy(data, (char *)user + offset, size);
    return true;
}

/* The checksums of the only group's records, for a front with another checksum. */
static void reseal_records(char *bytes, size_t size, size_t sealed, uint64_t seed)
{
    const size_t record = 2 * 2 * sizeof(float); /* two tokens, K and V */
    const kvl_snapshot_group group = {.token_bytes = (int64_t)record / 2};
    const kvl_snapshot snapshot = {.saved = {.block_size = 2, .num_groups = 1}, .groups = &group, .seed = seed};
    size_t at = sealed + KVL_SNAPSHOT_CHECKSUM;
    for (int32_t i = 0; at < size; i++, at += record + KVL_SNAPSHOT_CHECKSUM)
        kvl_snapshot_checksum(&snapshot, 0, i, bytes + at, (unsigned char *)bytes + at + record);
    assert_int_equal(at, size);
}

static void test_every_byte_of_the_file(void **state)
{
    (void)state;
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    const rig_params p = tiny();
    size_t size;
    char *bytes = make_file(&p, path, &size);
    rig r;
    rig_open(&r, &p);
    rig_seq *own = rig_seq_new(&r);
    add(&r, own, 500, 3);
    kvleaf_blocks_stats before = rig_stats(&r), after;
    kvleaf_snapshot_info info = {.struct_size = sizeof info};
    kvleaf_seq seq = 7;
    for (size_t i = 0; i < size; i++) {
        bytes[i] ^= (char)(1 << i % 8);
        support_write(path, bytes, size);
        bytes[i] ^= (char)(1 << i % 8);
        kvleaf_status status = load(&r, path, &seq, 1);
        if (status != KVLEAF_CORRUPT)
            fail_msg("byte %zu altered: %s", i, kvleaf_status_name(status));
        ASSERT_STATUS(KVLEAF_CORRUPT, kvleaf_snapshot_inspect(path, &info));
    }
    for (size_t i = 0; i < size; i++) {
        support_write(path, bytes, i);
        if (load(&r, path, &seq, 1) != KVLEAF_CORRUPT)
            fail_msg("cut to %zu bytes", i);
    }
    after = rig_stats(&r);
    assert_true(same_stats(&before, &after));
    assert_int_equal(seq, 7);
    rig_check_stored(&r, own, "after refusals");
    support_write(path, bytes, size);
    ASSERT_OK(load(&r, path, &seq, 1));
    rig_close(&r);
    free(bytes);
    free(path);
    support_folder_remove(folder);
}

/* A file of another cache: the fields that say so, patched and sealed again. */
static void test_other_caches(void **state)
{
    (void)state;
    enum { COUNTS = KVL_SNAPSHOT_HEAD, GROUP = COUNTS + 24, LAYER = GROUP + 48 };
    static const struct {
        const char *what;
        size_t at;
        unsigned char value;
        kvleaf_status status;
        const char *field;
    } rows[] = {
        {"the same", COUNTS, 2, KVLEAF_OK, NULL},
        {"layers with K and V", GROUP, 2, KVLEAF_FOREIGN, "groups"},
        {"heads", GROUP + 4, 2, KVLEAF_FOREIGN, "groups"},
        {"KV heads", GROUP + 8, 2, KVLEAF_FOREIGN, "groups"},
        {"head_dim of K", GROUP + 12, 2, KVLEAF_FOREIGN, "groups"},
        {"head_dim of V", GROUP + 16, 2, KVLEAF_FOREIGN, "groups"},
        {"dtype", GROUP + 20, KVLEAF_F16, KVLEAF_FOREIGN, "groups"},
        {"window", GROUP + 24, 9, KVLEAF_FOREIGN, "groups"},
        {"group", LAYER, 1, KVLEAF_FOREIGN, "layers"},
        {"layer of the pool", LAYER + 4, 1, KVLEAF_FOREIGN, "layers"},
        {"K and V of its own", LAYER + 8, 0, KVLEAF_FOREIGN, "layers"},
        {"softmax_scale", LAYER + 12, 1, KVLEAF_FOREIGN, "layers"},
        {"version", 8, 2, KVLEAF_UNSUPPORTED, "version"},
    };
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    const rig_params p = tiny();
    size_t size;
    char *bytes = make_file(&p, path, &size);
    kvl_snapshot_source source = {.read = read_bytes, .user = bytes, .size = size};
    kvl_snapshot snapshot;
    ASSERT_OK(kvl_snapshot_read(NULL, &source, &snapshot));
    size_t sealed = (size_t)snapshot.front_bytes - KVL_SNAPSHOT_CHECKSUM;
    kvl_snapshot_free(&snapshot);
    rig r;
    rig_open(&r, &p);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *other = malloc(size);
        kvleaf_seq seq = 0;
        memcpy(other, bytes, size);
        other[rows[i].at] = (char)rows[i].value;
        assert_int_equal(memcmp(other, bytes, size) == 0, rows[i].field == NULL);
        uint64_t seed = kvl_snapshot_seal(other, sealed, (unsigned char *)other + sealed);
        reseal_records(other, size, sealed, seed);
        support_write(path, other, size);
        kvleaf_blocks_stats before = rig_stats(&r), after;
        if (load(&r, path, &seq, 1) != rows[i].status)
            fail_msg("another %s: %s", rows[i].what, kvleaf_status_name(kvleaf_last_error()->status));
        after = rig_stats(&r);
        assert_int_equal(same_stats(&before, &after), rows[i].field != NULL);
        if (rows[i].field)
            assert_string_equal(kvleaf_last_error()->field, rows[i].field);
        else
            ASSERT_OK(kvleaf_seq_destroy(r.cache, &seq));
        free(other);
    }
    rig_close(&r);
    free(bytes);
    free(path);
    support_folder_remove(folder);
}

/* No room: for the blocks, and in a table. */
static void test_too_small_caches(void **state)
{
    (void)state;
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    for (int i = 0; i < 2; i++) {
        rig r;
        rig_params p = tiny();
        size_t size;
        free(make_file(&p, path, &size));
        if (i)
            p.max_context = 4;
        rig_open(&r, &p);
        add(&r, rig_seq_new(&r), 500, i ? 1 : 2);
        for (int j = 0; !i && j < 9; j++)
            add(&r, rig_seq_new(&r), 600 + 10 * j, 1);
        kvleaf_seq seq = 0;
        kvleaf_blocks_stats before = rig_stats(&r), after;
        ASSERT_STATUS(i ? KVLEAF_TOO_SMALL : KVLEAF_NO_BLOCKS, load(&r, path, &seq, 1));
        after = rig_stats(&r);
        assert_true(same_stats(&before, &after));
        rig_close(&r);
    }
    free(path);
    support_folder_remove(folder);
}

static void test_arguments(void **state)
{
    (void)state;
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf");
    char *missing = support_path(folder, "no/such/folder");
    rig_params p = tiny();
    rig r, other;
    rig_open(&r, &p);
    rig_open(&other, &p);
    rig_seq *seq = rig_seq_new(&r);
    add(&r, seq, 100, 5);
    kvleaf_exec exec = rig_exec(&r, &(rig_step){0}), foreign = rig_exec(&other, &(rig_step){0});
    kvleaf_snapshot_params params = {.struct_size = sizeof params, .seqs = &seq->seq, .num_seqs = 1};
    kvleaf_snapshot_info info = {.struct_size = sizeof info};
    kvleaf_seq loaded[2] = {0}, stale = rig_seq_new(&r)->seq, gone = stale;
    int32_t count = -1;
    ASSERT_OK(kvleaf_seq_destroy(r.cache, &gone));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_snapshot_save(NULL, path, &params, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvleaf_snapshot_save(r.cache, NULL, &params, &exec));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_snapshot_save(r.cache, path, NULL, &exec));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_snapshot_save(r.cache, path, &params, NULL));
    ASSERT_STATUS(KVLEAF_FOREIGN, kvleaf_snapshot_save(r.cache, path, &params, &foreign));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvleaf_snapshot_save(r.cache, missing, &params, &exec));
    params.num_seqs = -1;
    ASSERT_FAILS(KVLEAF_INVALID, "num_seqs", kvleaf_snapshot_save(r.cache, path, &params, &exec));
    params.num_seqs = 1;
    params.prefix_cache = 2;
    ASSERT_FAILS(KVLEAF_INVALID, "prefix_cache", kvleaf_snapshot_save(r.cache, path, &params, &exec));
    params.prefix_cache = 0;
    params.seqs = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "seqs", kvleaf_snapshot_save(r.cache, path, &params, &exec));
    params.seqs = &stale;
    ASSERT_STATUS(KVLEAF_STALE, kvleaf_snapshot_save(r.cache, path, &params, &exec));
    params.struct_size--;
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvleaf_snapshot_save(r.cache, path, &params, &exec));
    assert_int_equal(support_files(folder, "", NULL), 0);
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvleaf_snapshot_load(r.cache, path, loaded, 2, &count, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvleaf_snapshot_inspect(folder, &info));
    ASSERT_OK(save(&r, path, (kvleaf_seq[]){seq->seq, seq->seq}, 2));
    ASSERT_FAILS(KVLEAF_INVALID, "cache", kvleaf_snapshot_load(NULL, path, loaded, 2, &count, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvleaf_snapshot_load(r.cache, NULL, loaded, 2, &count, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "count", kvleaf_snapshot_load(r.cache, path, loaded, 2, NULL, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "seqs", kvleaf_snapshot_load(r.cache, path, NULL, 2, &count, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "capacity", kvleaf_snapshot_load(r.cache, path, loaded, -1, &count, &exec));
    ASSERT_STATUS(KVLEAF_FOREIGN, kvleaf_snapshot_load(r.cache, path, loaded, 2, &count, &foreign));
    count = -1;
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "capacity", kvleaf_snapshot_load(r.cache, path, loaded, 1, &count, &exec));
    assert_int_equal(count, 2);
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvleaf_snapshot_inspect(NULL, &info));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_snapshot_inspect(path, NULL));
    cl_event event = NULL;
    exec.event_out = &event;
    ASSERT_OK(kvleaf_snapshot_load(r.cache, path, loaded, 2, &count, &exec));
    assert_non_null(event);
    assert_int_equal(clWaitForEvents(1, &event), CL_SUCCESS);
    clReleaseEvent(event);
    rig_close(&r);
    rig_close(&other);
    free(missing);
    free(path);
    support_folder_remove(folder);
}

/* A limit on the size of files stands in for a full disk. */
static void test_full_disk(void **state)
{
    (void)state;
    char *folder = support_folder(), *path = support_path(folder, "cache.kvleaf"), *old;
    rig_params p = tiny();
    p.num_blocks = 200;
    size_t size, after = 0;
    old = make_file(&p, path, &size);
    rig r;
    rig_open(&r, &p);
    rig_seq *seq = rig_seq_new(&r);
    for (int32_t i = 0; i < 6; i++)
        add(&r, seq, 100 * i, 60);
    struct rlimit before, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (rlim_t most = 100; most < 18000; most += 8000) { /* in the front, in the records, at their end */
        limit = before;
        limit.rlim_cur = most;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        kvleaf_status status = save(&r, path, &seq->seq, 1);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_int_equal(status, KVLEAF_INVALID);
        char *now = support_slurp(path, &after);
        assert_int_equal(after, size);
        assert_memory_equal(now, old, size);
        assert_int_equal(support_files(folder, "", NULL), 1);
        free(now);
    }
    ASSERT_OK(save(&r, path, &seq->seq, 1));
    rig_close(&r);
    free(old);
    free(path);
    support_folder_remove(folder);
}

/* A cache with a sequence of its own and a cached prompt, and a file to be loaded that has blocks in common with it. */
typedef struct scene {
    rig r;
    support_memory memory;
    char *folder, *path, *other;
    rig_seq *own;
} scene;

static void open_scene(scene *s)
{
    rig_params p = tiny();
    size_t size;
    p.window[1] = 3;
    p.num_layers = 2;
    s->folder = support_folder();
    s->path = support_path(s->folder, "cache.kvleaf");
    s->other = support_path(s->folder, "other.kvleaf");
    free(make_file(&p, s->path, &size));
    shim_reset();
    s->memory = (support_memory){0};
    p.opencl = shim_table();
    p.allocator = support_allocator(&s->memory);
    rig_open(&s->r, &p);
    s->own = rig_seq_new(&s->r);
    add(&s->r, s->own, 100, 3);
}

static void close_scene(scene *s)
{
    rig_close(&s->r);
    assert_int_equal(s->memory.live, 0);
    assert_int_equal(shim_balance(), 0);
    free(s->other);
    free(s->path);
    support_folder_remove(s->folder);
}

/* One call that fails, or not: k-th allocation or k-th OpenCL call; whether it did. */
static bool fail_one(scene *s, bool opencl, int64_t k, bool loading)
{
    kvleaf_blocks_stats before = rig_stats(&s->r), after;
    kvleaf_seq seq = 0;
    s->memory.allocations = 0;
    s->memory.fail_at = opencl ? 0 : k;
    shim.calls = 0;
    shim.failed_entry = -1;
    shim.fail_at = opencl ? k : 0;
    kvleaf_status status = loading ? load(&s->r, s->path, &seq, 1) : save(&s->r, s->other, &s->own->seq, 1);
    bool failed = opencl ? shim.failed_entry >= 0 : s->memory.allocations >= k;
    shim.fail_at = 0;
    s->memory.fail_at = 0;
    if (!failed) {
        ASSERT_OK(status);
        return false;
    }
    if (opencl ? status != KVLEAF_DEVICE && status != KVLEAF_NO_MEMORY : status != KVLEAF_NO_MEMORY)
        fail_msg("%s %lld: %s", opencl ? "call" : "allocation", (long long)k, kvleaf_status_name(status));
    after = rig_stats(&s->r);
    assert_true(same_stats(&before, &after));
    assert_int_equal(seq, 0);
    assert_int_equal(support_files(s->folder, "", NULL), 1);
    rig_check_stored(&s->r, s->own, "after a failure");
    return true;
}

static void test_each_call_and_allocation_fails(void **state)
{
    (void)state;
    static const struct {
        bool opencl, loading;
        int64_t least;
    } rows[] = {{false, true, 15}, {true, true, 4}, {false, false, 15}, {true, false, 4}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        scene s;
        int64_t k = 1;
        open_scene(&s);
        while (fail_one(&s, rows[i].opencl, k, rows[i].loading))
            k++;
        assert_true(k > rows[i].least);
        if (!rows[i].loading) {
            kvleaf_seq seq = 0;
            ASSERT_OK(load(&s.r, s.other, &seq, 1));
        }
        close_scene(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_byte_of_the_file),
        cmocka_unit_test(test_other_caches),
        cmocka_unit_test(test_too_small_caches),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_each_call_and_allocation_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
