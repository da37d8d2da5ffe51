/* SPDX-License-Identifier: Apache-2.0 */
#include "safetensors.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define INVALID "KVLEAF_INVALID"
#define CORRUPT "KVLEAF_CORRUPT"

/* The format's own limit on its header. */
#define MAX_HEADER 100000000
/* Integers up to this are exact in a JSON reader that keeps numbers as doubles. */
#define MAX_EXACT 9007199254740992.0

typedef struct dtype_row {
    const char *name;
    weight_dtype dtype;
    uint64_t bits;
} dtype_row;

static const dtype_row dtype_rows[] = {
    {"F32", WEIGHT_F32, 32},   {"F16", WEIGHT_F16, 16},      {"BF16", WEIGHT_BF16, 16},    {"F64", WEIGHT_OTHER, 64},
    {"I64", WEIGHT_OTHER, 64}, {"U64", WEIGHT_OTHER, 64},    {"I32", WEIGHT_OTHER, 32},    {"U32", WEIGHT_OTHER, 32},
    {"I16", WEIGHT_OTHER, 16}, {"U16", WEIGHT_OTHER, 16},    {"I8", WEIGHT_OTHER, 8},      {"U8", WEIGHT_OTHER, 8},
    {"BOOL", WEIGHT_OTHER, 8}, {"F8_E4M3", WEIGHT_OTHER, 8}, {"F8_E5M2", WEIGHT_OTHER, 8},
};

size_t weight_dtype_size(weight_dtype dtype)
{
    return dtype == WEIGHT_F32 ? 4 : 2;
}

static const dtype_row *find_dtype(const char *name)
{
    for (size_t i = 0; i < sizeof dtype_rows / sizeof *dtype_rows; i++)
        if (strcmp(dtype_rows[i].name, name) == 0)
            return &dtype_rows[i];
    return NULL;
}

/* Whether the item is an integer in 0 .. 2^53; *out receives it. */
static bool whole_number(const cJSON *item, uint64_t *out)
{
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble > MAX_EXACT ||
        item->valuedouble != floor(item->valuedouble))
        return false;
    *out = (uint64_t)item->valuedouble;
    return true;
}

static bool read_shape(const cJSON *shape, tensor_entry *entry, uint64_t *elements, failure *error)
{
    const cJSON *item;

    if (!cJSON_IsArray(shape))
        return fail(error, CORRUPT, "tensor %s: shape is no array", entry->name);
    *elements = 1;
    cJSON_ArrayForEach(item, shape)
    {
        uint64_t extent;
        if (entry->rank == TENSOR_MAX_RANK)
            return fail(error, CORRUPT, "tensor %s: more than %d dimensions", entry->name, TENSOR_MAX_RANK);
        if (!whole_number(item, &extent))
            return fail(error, CORRUPT, "tensor %s: dimension %d of shape is no whole number", entry->name,
                        (int)entry->rank);
        if (extent != 0 && *elements > (uint64_t)MAX_EXACT / extent)
            return fail(error, CORRUPT, "tensor %s: shape has more than 2^53 elements", entry->name);
        *elements *= extent;
        entry->shape[entry->rank++] = (int64_t)extent;
    }
    return true;
}

static bool read_entry(const cJSON *item, uint64_t data_start, uint64_t data_size, tensor_entry *entry, failure *error)
{
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    const dtype_row *row;
    uint64_t begin, end, elements = 0;

    if (!cJSON_IsString(dtype) || (row = find_dtype(dtype->valuestring)) == NULL)
        return fail(error, CORRUPT, "tensor %s: dtype '%.40s' is unknown", entry->name,
                    cJSON_IsString(dtype) ? dtype->valuestring : "(no string)");
    entry->dtype = row->dtype;
    snprintf(entry->dtype_name, sizeof entry->dtype_name, "%s", row->name);
    if (!read_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), entry, &elements, error))
        return false;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !whole_number(cJSON_GetArrayItem(offsets, 0), &begin) || !whole_number(cJSON_GetArrayItem(offsets, 1), &end))
        return fail(error, CORRUPT, "tensor %s: data_offsets is no pair of whole numbers", entry->name);
    if (begin > end)
        return fail(error, CORRUPT, "tensor %s: data_offsets begin at %llu, behind their end %llu", entry->name,
                    (unsigned long long)begin, (unsigned long long)end);
    if (end > data_size)
        return fail(error, CORRUPT,
                    "tensor %s: data_offsets end at %llu, but the file has %llu data bytes (cut short?)", entry->name,
                    (unsigned long long)end, (unsigned long long)data_size);
    if ((end - begin) / (row->bits / 8) != elements || (end - begin) % (row->bits / 8) != 0)
        return fail(error, CORRUPT, "tensor %s: data_offsets hold %llu bytes, but shape and dtype %s take %llu bytes",
                    entry->name, (unsigned long long)(end - begin), row->name,
                    (unsigned long long)(elements * (row->bits / 8)));
    entry->begin = data_start + begin;
    entry->end = data_start + end;
    return true;
}

static int by_begin(const void *left, const void *right)
{
    const tensor_entry *a = left, *b = right;

    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    return (a->end > b->end) - (a->end < b->end);
}

/* The format leaves no hole between tensors and none behind them. */
static bool check_cover(safetensors *file, uint64_t data_start, uint64_t data_size, failure *error)
{
    uint64_t at = data_start;

    qsort(file->entries, (size_t)file->count, sizeof *file->entries, by_begin);
    for (int32_t i = 0; i < file->count; i++) {
        const tensor_entry *entry = &file->entries[i];
        if (entry->begin != at)
            return fail(error, CORRUPT, "tensor %s: data_offsets begin at %llu, but the tensor before ends at %llu",
                        entry->name, (unsigned long long)(entry->begin - data_start),
                        (unsigned long long)(at - data_start));
        at = entry->end;
    }
    if (at != data_start + data_size)
        return fail(error, CORRUPT, "the last tensor ends at data byte %llu, but the file has %llu data bytes",
                    (unsigned long long)(at - data_start), (unsigned long long)data_size);
    return true;
}

static bool same_name_before(const safetensors *file, const char *name)
{
    for (int32_t i = 0; i < file->count; i++)
        if (strcmp(file->entries[i].name, name) == 0)
            return true;
    return false;
}

static bool read_entries(safetensors *file, const cJSON *header, uint64_t data_start, uint64_t data_size,
                         failure *error)
{
    const cJSON *item;
    size_t names = (size_t)cJSON_GetArraySize(header);

    if (!cJSON_IsObject(header))
        return fail(error, CORRUPT, "the header is no JSON object");
    file->entries = calloc(names ? names : 1, sizeof *file->entries);
    if (file->entries == NULL)
        return fail(error, "KVLEAF_NO_MEMORY", "no memory for %zu tensor entries", names);
    cJSON_ArrayForEach(item, header)
    {
        if (strcmp(item->string, "__metadata__") == 0)
            continue;
        if (same_name_before(file, item->string))
            return fail(error, CORRUPT, "tensor %s stands twice in the header", item->string);
        tensor_entry *entry = &file->entries[file->count];
        size_t length = strlen(item->string) + 1;
        entry->name = malloc(length);
        if (entry->name == NULL)
            return fail(error, "KVLEAF_NO_MEMORY", "no memory for a tensor name");
        memcpy(entry->name, item->string, length);
        file->count++;
        if (!read_entry(item, data_start, data_size, entry, error))
            return false;
    }
    return check_cover(file, data_start, data_size, error);
}

static bool file_size(FILE *file, uint64_t *out)
{
    long end;

    if (fseek(file, 0, SEEK_END) != 0 || (end = ftell(file)) < 0 || fseek(file, 0, SEEK_SET) != 0)
        return false;
    *out = (uint64_t)end;
    return true;
}

static bool read_header(safetensors *file, failure *error)
{
    unsigned char prefix[8];
    uint64_t size, length = 0;

    if (!file_size(file->file, &size))
        return fail(error, INVALID, "its size can't be read: %s", strerror(errno));
    if (size < sizeof prefix || fread(prefix, 1, sizeof prefix, file->file) != sizeof prefix)
        return fail(error, CORRUPT, "%llu bytes are no safetensors file, which begins with 8 bytes of header length",
                    (unsigned long long)size);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | prefix[i];
    if (length > MAX_HEADER)
        return fail(error, CORRUPT, "header length %llu is over the limit of %d bytes", (unsigned long long)length,
                    MAX_HEADER);
    if (length > size - sizeof prefix)
        return fail(error, CORRUPT, "header length %llu is beyond the file's %llu bytes (cut short?)",
                    (unsigned long long)length, (unsigned long long)size);

    char *text = malloc((size_t)length + 1);
    if (text == NULL)
        return fail(error, "KVLEAF_NO_MEMORY", "no memory for a header of %llu bytes", (unsigned long long)length);
    bool right = fread(text, 1, (size_t)length, file->file) == length;
    text[length] = '\0';
    cJSON *header = right ? cJSON_ParseWithLength(text, (size_t)length + 1) : NULL;
    if (header == NULL)
        right = fail(error, CORRUPT, "the header of %llu bytes is no JSON", (unsigned long long)length);
    else
        right = read_entries(file, header, length + sizeof prefix, size - sizeof prefix - length, error);
    cJSON_Delete(header);
    free(text);
    return right;
}

bool safetensors_open(safetensors *file, const char *path, failure *error)
{
    failure inner;
    size_t length = strlen(path) + 1;

    memset(file, 0, sizeof *file);
    file->path = malloc(length);
    if (file->path == NULL)
        return fail(error, "KVLEAF_NO_MEMORY", "no memory for a path");
    memcpy(file->path, path, length);
    file->file = fopen(path, "rb");
    if (file->file == NULL)
        return fail(error, INVALID, "%s: %s", path, strerror(errno));
    if (!read_header(file, &inner))
        return fail(error, inner.status, "%s: %s", path, inner.message);
    return true;
}

void safetensors_close(safetensors *file)
{
    for (int32_t i = 0; i < file->count; i++)
        free(file->entries[i].name);
    free(file->entries);
    free(file->path);
    if (file->file != NULL)
        fclose(file->file);
    memset(file, 0, sizeof *file);
}

static void print_shape(const tensor_entry *entry, char *text, size_t size)
{
    size_t at = (size_t)snprintf(text, size, "[");

    for (int32_t i = 0; i < entry->rank && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, i ? ", %lld" : "%lld", (long long)entry->shape[i]);
    if (at < size)
        snprintf(text + at, size - at, "]");
}

bool safetensors_find(const safetensors *file, const char *name, int64_t rows, int64_t columns,
                      const tensor_entry **out, failure *error)
{
    const tensor_entry *entry = NULL;
    char is[200], wanted[64];

    for (int32_t i = 0; i < file->count && entry == NULL; i++)
        if (strcmp(file->entries[i].name, name) == 0)
            entry = &file->entries[i];
    if (entry == NULL)
        return fail(error, INVALID, "%s: tensor %s is missing", file->path, name);
    if (entry->dtype == WEIGHT_OTHER)
        return fail(error, "KVLEAF_UNSUPPORTED", "%s: tensor %s: dtype %s is none of F32, F16, BF16", file->path, name,
                    entry->dtype_name);
    bool fits = rows == 0 ? entry->rank == 1 && entry->shape[0] == columns
                          : entry->rank == 2 && entry->shape[0] == rows && entry->shape[1] == columns;
    if (!fits) {
        print_shape(entry, is, sizeof is);
        if (rows == 0)
            snprintf(wanted, sizeof wanted, "[%lld]", (long long)columns);
        else
            snprintf(wanted, sizeof wanted, "[%lld, %lld]", (long long)rows, (long long)columns);
        return fail(error, INVALID, "%s: tensor %s: shape %s is not %s, which config.json asks for", file->path, name,
                    is, wanted);
    }
    *out = entry;
    return true;
}

bool safetensors_read(const safetensors *file, const tensor_entry *entry, uint64_t offset, void *data, size_t size,
                      failure *error)
{
    uint64_t whole = entry->end - entry->begin;

    if (offset > whole || size > whole - offset)
        return fail(error, INVALID, "%s: tensor %s: bytes %llu + %zu are beyond its %llu", file->path, entry->name,
                    (unsigned long long)offset, size, (unsigned long long)whole);
    if (fseek(file->file, (long)(entry->begin + offset), SEEK_SET) != 0 || fread(data, 1, size, file->file) != size)
        return fail(error, CORRUPT, "%s: tensor %s: %zu bytes at %llu can't be read", file->path, entry->name, size,
                    (unsigned long long)(entry->begin + offset));
    return true;
}
