/* SPDX-License-Identifier: Apache-2.0 */
/* The disk cache of program binaries and of passed trials, one file each, named by the hash of its key, and the marks
 * of trials that go on. Drivers crash on bytes that are not theirs, so nothing reaches one before key and checksum were
 * compared. */
#include "device/program.h"

#include <string.h>
#include <xxhash.h>

#define MAGIC 0x314e49424c564bull /* "KVLBIN1" */

enum { FORMAT = 1 };

/* Native byte order: a file from a machine of the other order fails the magic. */
typedef struct entry_header {
    uint64_t magic;
    uint32_t format;
    uint32_t header_size;
    uint64_t key_size;
    uint64_t binary_size;
    XXH128_canonical_t checksum; /* of key and binary as they follow */
} entry_header;

void kvl_hash_text(const kvl_text *key, char text[KVL_HASH_TEXT])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(key->data, key->size));
    for (size_t i = 0; i < sizeof canonical.digest; i++) {
        text[2 * i] = "0123456789abcdef"[canonical.digest[i] >> 4];
        text[2 * i + 1] = "0123456789abcdef"[canonical.digest[i] & 15];
    }
    text[KVL_HASH_TEXT - 1] = 0;
}

static void entry_path(const kvleaf_device *device, const kvl_text *key, const char *suffix, kvl_text *path)
{
    char name[KVL_HASH_TEXT];
    kvl_hash_text(key, name);
    kvl_text_format(path, "%s/%s.%s", device->cache_dir, name, suffix);
}

/* NULL where the file is exactly the key's entry, else what is wrong with it. */
static const char *refuse_entry(const char *data, size_t size, const kvl_text *key)
{
    entry_header header;
    if (size < sizeof header)
        return "is cut short";
    memcpy(&header, data, sizeof header);
    if (header.magic != MAGIC || header.format != FORMAT || header.header_size != sizeof header)
        return "is of another format";
    size_t rest = size - sizeof header;
    if (header.key_size > rest || header.binary_size != rest - header.key_size || header.binary_size == 0)
        return "is cut short";
    XXH128_canonical_t checksum;
    XXH128_canonicalFromHash(&checksum, XXH3_128bits(data + sizeof header, rest));
    if (memcmp(&checksum, &header.checksum, sizeof checksum) != 0)
        return "fails its checksum";
    if (header.key_size != key->size || memcmp(data + sizeof header, key->data, key->size) != 0)
        return "belongs to another program, device or driver";
    return NULL;
}

bool kvl_disk_load(const kvleaf_device *device, const kvl_text *key, char **binary, size_t *size)
{
    kvl_text path = {.allocator = &device->allocator};
    entry_path(device, key, "bin", &path);
    char *data = NULL;
    size_t data_size = 0;
    if (path.failed || !kvl_file_read(&device->allocator, path.data, &data, &data_size)) {
        kvl_text_free(&path);
        return false;
    }
    const char *reason = refuse_entry(data, data_size, key);
    if (reason) {
        kvl_log(&device->logger, KVLEAF_LOG_WARNING, "disk cache: %s %s; it is made again", path.data, reason);
        kvl_free(&device->allocator, data);
        data = NULL;
    } else {
        *size = data_size - sizeof(entry_header) - key->size;
        memmove(data, data + sizeof(entry_header) + key->size, *size);
        *binary = data;
    }
    kvl_text_free(&path);
    return reason == NULL;
}

void kvl_disk_store(const kvleaf_device *device, const kvl_text *key, const void *binary, size_t size)
{
    kvl_text path = {.allocator = &device->allocator}, file = {.allocator = &device->allocator};
    entry_path(device, key, "bin", &path);
    entry_header header = {
        .magic = MAGIC, .format = FORMAT, .header_size = sizeof header, .key_size = key->size, .binary_size = size};
    kvl_text_append(&file, (const char *)&header, sizeof header);
    kvl_text_append(&file, key->data, key->size);
    kvl_text_append(&file, binary, size);
    if (!path.failed && !file.failed) {
        XXH128_canonicalFromHash(&header.checksum, XXH3_128bits(file.data + sizeof header, file.size - sizeof header));
        memcpy(file.data, &header, sizeof header);
        if (!kvl_folder_make(device->cache_dir) || !kvl_file_replace(path.data, file.data, file.size))
            kvl_log(&device->logger, KVLEAF_LOG_WARNING, "disk cache: %s can't be written; going on without",
                    path.data);
    }
    kvl_text_free(&file);
    kvl_text_free(&path);
}

kvleaf_status kvl_trial_begin(const kvleaf_device *device, const char *name, kvl_mark **out)
{
    *out = NULL;
    if (!device->cache_dir)
        return KVLEAF_OK;
    kvleaf_status status = KVLEAF_OK;
    kvl_text key = {.allocator = &device->allocator}, path = {.allocator = &device->allocator};
    kvl_text_format(&key, "%strial: %s\n", kvl_device_identity(device)->data, name);
    if (!key.failed)
        entry_path(device, &key, "trial", &path);
    if (key.failed || path.failed)
        status = kvl_fail_memory(path.capacity);
    else if (kvl_folder_make(device->cache_dir) && !kvl_mark_begin(&device->allocator, path.data, out))
        status = kvl_fail(
            KVLEAF_UNSUPPORTED, "variant", 0, 0,
            "an earlier trial of it ended the process or failed on the device; without the file %s it is tried again",
            path.data);
    kvl_text_free(&path);
    kvl_text_free(&key);
    return status;
}
