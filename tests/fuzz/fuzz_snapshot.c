/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: the bytes are a snapshot. As they are, they are refused or right in every byte; with sizes and checksum of
 * the front made to fit, whatever the description says must not lead astray. */
#include "snapshot_sample.h"

static kvleaf_status read_front(const unsigned char *data, size_t size, bool verify)
{
    memory_source memory = {.data = data, .size = size};
    kvl_snapshot_source source = memory_source_of(&memory);
    kvl_snapshot read;
    kvleaf_status status = kvl_snapshot_read(NULL, &source, &read);
    if (status)
        return status;
    if (verify)
        status = kvl_snapshot_verify(&read, &source);
    kvl_snapshot_free(&read);
    return status;
}

static void put64(unsigned char *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(value >> 8 * i);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
    read_front(data, size, true);
    if (size < KVL_SNAPSHOT_HEAD + KVL_SNAPSHOT_CHECKSUM)
        return 0;
    unsigned char *sealed = malloc(size);
    if (!sealed)
        return 0;
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
    read_front(sealed, size, false);
    free(sealed);
    return 0;
}
