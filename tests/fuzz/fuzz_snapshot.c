/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: the bytes are a snapshot. As they are, they are refused or right in every byte. With sizes and checksum of
 * the front made to fit, whatever the description says must not lead astray: a block manager of its shape takes it and
 * keeps every invariant, can be used afterwards and saved again, or refuses it unchanged. */
#include "saved_support.h"

#include "snapshot_sample.h"

enum { BLOCKS = 24, SEQS = 8 };

static kvleaf_blocks *make_like(const kvl_saved *saved, bool no_prefix_cache)
{
    kvleaf_block_group groups[KVL_MAX_GROUPS];
    kvleaf_blocks *blocks = NULL;
    if (saved->num_groups > KVL_MAX_GROUPS)
        return NULL;
    for (int32_t i = 0; i < saved->num_groups; i++)
        groups[i] = (kvleaf_block_group){.num_blocks = BLOCKS, .window = saved->windows[i]};
    assert_ok(kvleaf_blocks_create(kvleaf_blocks_params(.block_size = saved->block_size, .max_sequences = SEQS,
                                                        .groups = groups, .num_groups = saved->num_groups,
                                                        .no_prefix_cache = no_prefix_cache),
                                   &blocks));
    return blocks;
}

static void use(kvleaf_blocks *blocks, kvleaf_seq *seqs, int32_t n)
{
    kvl_save save;
    for (int32_t i = 0; i < n; i++)
        if (extend(blocks, seqs[i], 3) == KVLEAF_OK)
            compute(blocks, seqs[i]);
    check_blocks(blocks, 0);
    assert_ok(kvl_save_begin(blocks, seqs, n, true, &save));
    kvl_save_free(blocks, &save);
    for (int32_t i = 0; i < n; i++)
        assert_ok(kvleaf_blocks_seq_destroy(blocks, &seqs[i]));
    check_blocks(blocks, 0);
}

static void load(const kvl_saved *saved, bool no_prefix_cache, bool done)
{
    kvleaf_blocks *blocks = make_like(saved, no_prefix_cache);
    kvleaf_seq seqs[SEQS] = {0};
    kvl_load load;
    for (int32_t again = 0; blocks && again < 2; again++) {
        if (kvl_load_begin(blocks, saved, seqs, &load) != KVLEAF_OK) {
            check_blocks(blocks, 0);
            continue;
        }
        kvl_load_end(blocks, saved, &load, seqs, done);
        check_blocks(blocks, 0);
        use(blocks, seqs, done ? saved->num_seqs : 0);
    }
    kvleaf_blocks_destroy(&blocks);
}

static void read_all(const unsigned char *data, size_t size, bool sealed)
{
    memory_source memory = {.data = data, .size = size};
    kvl_snapshot_source source = memory_source_of(&memory);
    kvl_snapshot read;
    if (kvl_snapshot_read(NULL, &source, &read) != KVLEAF_OK)
        return;
    if (sealed) {
        load(&read.saved, false, true);
        load(&read.saved, false, false);
        load(&read.saved, true, true);
    } else {
        kvl_snapshot_verify(&read, &source);
    }
    kvl_snapshot_free(&read);
}

static void put64(unsigned char *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(value >> 8 * i);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    read_all(data, size, false);
    if (size < KVL_SNAPSHOT_HEAD + KVL_SNAPSHOT_CHECKSUM)
        return 0;
    unsigned char *sealed = malloc(size);
    assert_non_null(sealed);
    memcpy(sealed, data, size);
    memcpy(sealed, KVL_SNAPSHOT_MAGIC, 8);
    put64(sealed + 8, KVL_SNAPSHOT_VERSION);
    put64(sealed + 16, size);
    uint64_t most = (size - KVL_SNAPSHOT_HEAD - KVL_SNAPSHOT_CHECKSUM) & ~(uint64_t)7, description = 0;
    for (int i = 7; i >= 0; i--)
        description = description << 8 | sealed[24 + i];
    description = description > most || description % 8 ? most : description;
    put64(sealed + 24, description);
    size_t front = (size_t)description + KVL_SNAPSHOT_HEAD;
    kvl_snapshot_seal(sealed, front, sealed + front);
    read_all(sealed, size, true);
    free(sealed);
    return 0;
}
