/* SPDX-License-Identifier: Apache-2.0 */
/* Protects what is read from a snapshot: whatever was written comes back, and no cut, altered or lying file is taken.
 */
#include "support.h"

#include "snapshot_sample.h"

/* The front alone: a front that was changed is none to the records. */
static kvleaf_status read_front(const unsigned char *data, size_t size)
{
    memory_source memory = {.data = data, .size = size};
    kvl_snapshot_source source = memory_source_of(&memory);
    kvl_snapshot read;
    kvleaf_status status = kvl_snapshot_read(NULL, &source, &read);
    if (!status)
        kvl_snapshot_free(&read);
    return status;
}

static kvleaf_status read_all(const kvleaf_allocator *allocator, const unsigned char *data, size_t size)
{
    memory_source memory = {.data = data, .size = size};
    kvl_snapshot_source source = memory_source_of(&memory);
    kvl_snapshot read;
    kvleaf_status status = kvl_snapshot_read(allocator, &source, &read);
    if (!status) {
        status = kvl_snapshot_verify(&read, &source);
        kvl_snapshot_free(&read);
    }
    return status;
}

static void check_content(const kvl_content *a, const kvl_content *b)
{
    assert_memory_equal(a->digest, b->digest, sizeof a->digest);
    assert_int_equal(a->end, b->end);
}

static void check_seq(const kvl_saved_seq *a, const kvl_saved_seq *b, int32_t columns, int32_t groups)
{
    assert_true(a->user == b->user && a->salt == b->salt && a->ttl_ms == b->ttl_ms);
    assert_int_equal(a->priority, b->priority);
    assert_int_equal(a->no_prefix, b->no_prefix);
    assert_int_equal(a->tokens, b->tokens);
    assert_int_equal(a->known, b->known);
    assert_memory_equal(a->ids, b->ids, (size_t)a->known * sizeof *a->ids);
    for (int32_t i = 0; i < columns; i++)
        check_content(&a->content[i], &b->content[i]);
    assert_memory_equal(a->records, b->records, (size_t)(columns * groups) * sizeof *a->records);
}

static void test_round_trip(void **state)
{
    (void)state;
    kvl_snapshot written = sample_snapshot(), read;
    size_t size = 0;
    unsigned char *bytes = sample_bytes(&written, &size), data[64];
    memory_source memory = {.data = bytes, .size = size};
    kvl_snapshot_source source = memory_source_of(&memory);
    ASSERT_OK(kvl_snapshot_read(NULL, &source, &read));
    assert_int_equal(read.bytes, size);
    assert_int_equal(written.bytes, size);
    assert_int_equal(read.num_layers, 2);
    assert_memory_equal(read.groups, sample_groups, sizeof sample_groups);
    assert_memory_equal(read.layers, sample_layers, sizeof sample_layers);
    assert_int_equal(read.saved.block_size, 2);
    assert_int_equal(read.saved.num_groups, 2);
    assert_int_equal(read.saved.num_seqs, 2);
    assert_int_equal(read.saved.num_entries, 2);
    assert_memory_equal(read.saved.windows, sample_windows, sizeof sample_windows);
    assert_memory_equal(read.saved.num_records, sample_num_records, sizeof sample_num_records);
    check_seq(&read.saved.seqs[0], &sample_seqs[0], 3, 2);
    check_seq(&read.saved.seqs[1], &sample_seqs[1], 2, 2);
    for (int i = 0; i < 2; i++) {
        const kvl_saved_entry *a = &read.saved.entries[i], *b = &sample_entries[i];
        assert_true(a->salt == b->salt && a->ttl_ms == b->ttl_ms);
        check_content(&a->content, &b->content);
        assert_int_equal(a->parent, b->parent);
        assert_int_equal(a->priority, b->priority);
        assert_memory_equal(a->ids, b->ids, 2 * sizeof *a->ids);
        assert_memory_equal(a->records, b->records, 2 * sizeof *a->records);
    }
    for (int32_t group = 0; group < 2; group++) {
        for (int32_t record = 0; record < 4; record++) {
            ASSERT_OK(kvl_snapshot_read_record(&read, &source, group, record, data));
            for (uint64_t i = 0; i < kvl_snapshot_record_bytes(&read, group); i++)
                assert_int_equal(data[i], 16 * group + record);
        }
    }
    ASSERT_OK(kvl_snapshot_verify(&read, &source));
    kvl_snapshot_free(&read);
    free(bytes);
}

/* A snapshot of nothing is a snapshot. */
static void test_empty(void **state)
{
    (void)state;
    static const int32_t none[2] = {0};
    kvl_snapshot_group groups[2] = {sample_groups[0], sample_groups[1]};
    groups[0].num_records = groups[1].num_records = 0;
    kvl_snapshot empty = sample_snapshot();
    empty.groups = groups;
    empty.saved.num_seqs = empty.saved.num_entries = 0;
    empty.saved.num_records = none;
    size_t size = 0;
    unsigned char *bytes = sample_bytes(&empty, &size);
    ASSERT_OK(read_all(NULL, bytes, size));
    free(bytes);
}

static void test_every_byte_counts(void **state)
{
    (void)state;
    kvl_snapshot written = sample_snapshot();
    size_t size = 0;
    unsigned char *bytes = sample_bytes(&written, &size);
    for (size_t at = 0; at < size; at++) {
        for (int bit = 0; bit < 8; bit++) {
            bytes[at] ^= (unsigned char)(1 << bit);
            kvleaf_status status = read_all(NULL, bytes, size);
            if (status != KVLEAF_CORRUPT)
                fail_msg("bit %d of byte %zu flipped: %s", bit, at, kvleaf_status_name(status));
            assert_true(kvleaf_last_error()->message[0] != 0);
            bytes[at] ^= (unsigned char)(1 << bit);
        }
    }
    for (size_t length = 0; length < size; length++) {
        unsigned char *cut = malloc(length ? length : 1); /* so that a sanitizer sees a read past the cut */
        memcpy(cut, bytes, length);
        if (read_all(NULL, cut, length) != KVLEAF_CORRUPT)
            fail_msg("cut to %zu bytes", length);
        free(cut);
    }
    bytes = realloc(bytes, size + 1);
    bytes[size] = 0;
    ASSERT_STATUS(KVLEAF_CORRUPT, read_all(NULL, bytes, size + 1));
    free(bytes);
}

/* A record is bound to its place and its file: one from elsewhere, whole with its checksum, is not taken. */
static void test_records_of_elsewhere(void **state)
{
    (void)state;
    kvl_snapshot written = sample_snapshot(), other = sample_snapshot();
    kvl_saved_seq seqs[2] = {sample_seqs[0], sample_seqs[1]};
    seqs[0].user++;
    other.saved.seqs = seqs;
    size_t size = 0, record = 2 * 4 + KVL_SNAPSHOT_CHECKSUM;
    unsigned char *bytes = sample_bytes(&written, &size), *others = sample_bytes(&other, &size), one[64], two[64];
    assert_true(size > written.front_bytes + 2 * record && record <= sizeof one);
    unsigned char *first = bytes + written.front_bytes, *second = first + record;
    memcpy(one, first, record);
    memcpy(two, second, record);
    memcpy(first, two, record);
    memcpy(second, one, record);
    ASSERT_STATUS(KVLEAF_CORRUPT, read_all(NULL, bytes, size));
    memcpy(first, one, record);
    memcpy(second, two, record);
    ASSERT_OK(read_all(NULL, bytes, size));
    memcpy(second, others + written.front_bytes + record, record);
    ASSERT_STATUS(KVLEAF_CORRUPT, read_all(NULL, bytes, size));
    free(bytes);
    free(others);
}

static void reseal(unsigned char *bytes, size_t front)
{
    kvl_snapshot_seal(bytes, front - KVL_SNAPSHOT_CHECKSUM, bytes + front - KVL_SNAPSHOT_CHECKSUM);
}

/* Where things stand in the sample's description. */
enum {
    AT_COUNTS = KVL_SNAPSHOT_HEAD,
    AT_GROUP = AT_COUNTS + 24,
    AT_LAYER = AT_GROUP + 2 * 48,
    AT_SEQ = AT_LAYER + 2 * 16,
    AT_SEQ_RECORDS = AT_SEQ + 48 + 24 + 72,
    AT_SEQ_2 = AT_SEQ_RECORDS + 24,
    AT_ENTRY = AT_SEQ_2 + 48 + 16 + 48 + 16,
    AT_ENTRY_2 = AT_ENTRY + 48 + 8 + 8,
    AT_END = AT_ENTRY_2 + 48 + 8 + 8
};

/* Files that say something wrong and are well sealed. */
static void test_lies(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        size_t at, bytes;
        int64_t value;
        kvleaf_status status;
    } lies[] = {
        {"another user", AT_SEQ, 8, 99, KVLEAF_OK},
        {"a later version", 8, 4, KVL_SNAPSHOT_VERSION + 1, KVLEAF_UNSUPPORTED},
        {"version 0", 8, 4, 0, KVLEAF_UNSUPPORTED},
        {"fewer bytes", 16, 8, 100, KVLEAF_CORRUPT},
        {"all the bytes", 16, 8, -1, KVLEAF_CORRUPT},
        {"a description of all bytes", 24, 8, -8, KVLEAF_CORRUPT},
        {"a description of odd length", 24, 8, AT_END - KVL_SNAPSHOT_HEAD - 1, KVLEAF_CORRUPT},
        {"a shorter description", 24, 8, 8, KVLEAF_CORRUPT},
        {"block size 0", AT_COUNTS, 4, 0, KVLEAF_CORRUPT},
        {"block size 257", AT_COUNTS, 4, 257, KVLEAF_CORRUPT},
        {"block size 3", AT_COUNTS, 4, 3, KVLEAF_CORRUPT},
        {"no group", AT_COUNTS + 4, 4, 0, KVLEAF_CORRUPT},
        {"2^31-1 groups", AT_COUNTS + 4, 4, INT32_MAX, KVLEAF_CORRUPT},
        {"-1 layers", AT_COUNTS + 8, 4, -1, KVLEAF_CORRUPT},
        {"2^31-1 layers", AT_COUNTS + 8, 4, INT32_MAX, KVLEAF_CORRUPT},
        {"2^31-1 sequences", AT_COUNTS + 12, 4, INT32_MAX, KVLEAF_CORRUPT},
        {"a sequence fewer", AT_COUNTS + 12, 4, 1, KVLEAF_CORRUPT},
        {"-1 sequences", AT_COUNTS + 12, 4, -1, KVLEAF_CORRUPT},
        {"2^31-1 entries", AT_COUNTS + 16, 4, INT32_MAX, KVLEAF_CORRUPT},
        {"an entry fewer", AT_COUNTS + 16, 4, 1, KVLEAF_CORRUPT},
        {"an entry more", AT_COUNTS + 16, 4, 3, KVLEAF_CORRUPT},
        {"window -1", AT_GROUP + 24, 4, -1, KVLEAF_CORRUPT},
        {"a wider window, whose block is not there", AT_GROUP + 48 + 24, 4, 5, KVLEAF_CORRUPT},
        {"no window, but a block left out", AT_GROUP + 48 + 24, 4, 0, KVLEAF_CORRUPT},
        {"tokens of no bytes", AT_GROUP + 32, 8, 0, KVLEAF_CORRUPT},
        {"tokens of 2^62 bytes", AT_GROUP + 32, 8, (int64_t)1 << 62, KVLEAF_CORRUPT},
        {"-1 records", AT_GROUP + 40, 8, -1, KVLEAF_CORRUPT},
        {"2^31 records", AT_GROUP + 40, 8, (int64_t)1 << 31, KVLEAF_CORRUPT},
        {"a record fewer", AT_GROUP + 40, 8, 3, KVLEAF_CORRUPT},
        {"-1 tokens", AT_SEQ + 24, 8, -1, KVLEAF_CORRUPT},
        {"2^63-1 tokens", AT_SEQ + 24, 8, INT64_MAX, KVLEAF_CORRUPT},
        {"2^31 tokens", AT_SEQ + 24, 8, (int64_t)1 << 31, KVLEAF_CORRUPT},
        {"more known than there are", AT_SEQ + 32, 8, SAMPLE_TOKENS_A + 1, KVLEAF_CORRUPT},
        {"-1 known", AT_SEQ + 32, 8, -1, KVLEAF_CORRUPT},
        {"a record past the last", AT_SEQ_RECORDS, 4, 4, KVLEAF_CORRUPT},
        {"record -2", AT_SEQ_RECORDS + 12, 4, -2, KVLEAF_CORRUPT},
        {"no record where there is no window", AT_SEQ_RECORDS + 4, 4, -1, KVLEAF_CORRUPT},
        {"no record inside the window", AT_SEQ_RECORDS + 16, 4, -1, KVLEAF_CORRUPT},
        {"an entry that is its own parent", AT_ENTRY + 40, 4, 0, KVLEAF_CORRUPT},
        {"a parent that comes later", AT_ENTRY + 40, 4, 1, KVLEAF_CORRUPT},
        {"parent -2", AT_ENTRY_2 + 40, 4, -2, KVLEAF_CORRUPT},
        {"an entry's record past the last", AT_ENTRY + 56, 4, 4, KVLEAF_CORRUPT},
        {"an entry's record -2", AT_ENTRY_2 + 60, 4, -2, KVLEAF_CORRUPT},
    };
    kvl_snapshot written = sample_snapshot();
    size_t size = 0;
    unsigned char *truth = sample_bytes(&written, &size), *lie = malloc(size);
    assert_int_equal(written.front_bytes, AT_END + KVL_SNAPSHOT_CHECKSUM);
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        memcpy(lie, truth, size);
        for (size_t b = 0; b < lies[i].bytes; b++)
            lie[lies[i].at + b] = (unsigned char)((uint64_t)lies[i].value >> 8 * b);
        assert_memory_not_equal(lie, truth, size);
        reseal(lie, (size_t)written.front_bytes);
        kvleaf_status status = read_front(lie, size);
        if (status != lies[i].status)
            fail_msg("%s: %s", lies[i].what, kvleaf_status_name(status));
    }
    free(lie);
    free(truth);
}

/* Every allocation failing in turn, and none larger than a few times the file. */
typedef struct meter {
    support_memory memory;
    size_t most;
} meter;

static void *metered(void *user, size_t size)
{
    meter *m = user;
    m->most = size > m->most ? size : m->most;
    return support_allocator(&m->memory).allocate(&m->memory, size);
}

static void metered_release(void *user, void *memory)
{
    meter *m = user;
    support_allocator(&m->memory).release(&m->memory, memory);
}

static void test_memory(void **state)
{
    (void)state;
    kvl_snapshot written = sample_snapshot();
    size_t size = 0;
    unsigned char *bytes = sample_bytes(&written, &size);
    meter m = {0};
    const kvleaf_allocator allocator = {.allocate = metered, .release = metered_release, .user = &m};
    int64_t failed = 0;
    for (m.memory.fail_at = 1;; m.memory.fail_at++) {
        m.memory.allocations = 0;
        kvleaf_status status = read_all(&allocator, bytes, size);
        assert_int_equal(m.memory.live, 0);
        if (!status)
            break;
        assert_int_equal(status, KVLEAF_NO_MEMORY);
        failed++;
    }
    assert_int_equal(failed, 7);
    assert_true(m.most <= 4 * size);
    free(bytes);
}

static bool refuse_read(void *user, uint64_t offset, void *data, size_t size)
{
    int *left = user;
    (void)offset;
    memset(data, 0, size);
    return (*left)-- > 0;
}

static void test_source_fails(void **state)
{
    (void)state;
    kvl_snapshot read;
    int left = 0;
    const kvl_snapshot_source source = {.read = refuse_read, .user = &left, .size = 1000};
    ASSERT_STATUS(KVLEAF_CORRUPT, kvl_snapshot_read(NULL, &source, &read));
}

/* Sizes are counted in 64 bits, and refused where those are too few. */
static void test_too_large(void **state)
{
    (void)state;
    kvl_snapshot_group groups[2] = {sample_groups[0], sample_groups[1]};
    kvl_snapshot large = sample_snapshot();
    large.groups = groups;
    kvl_text out = {0};
    groups[0].token_bytes = (int64_t)1 << 40;
    ASSERT_OK(kvl_snapshot_write_front(&large, &out));
    assert_true(large.bytes > (uint64_t)4 << 41);
    kvl_text_free(&out);
    groups[0].token_bytes = (int64_t)1 << 61;
    ASSERT_STATUS(KVLEAF_UNSUPPORTED, kvl_snapshot_write_front(&large, &out));
    kvl_text_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_every_byte_counts),
        cmocka_unit_test(test_records_of_elsewhere),
        cmocka_unit_test(test_lies),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_source_fails),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
