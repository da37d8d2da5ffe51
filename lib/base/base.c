/* SPDX-License-Identifier: Apache-2.0 */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *allocate(const kvleaf_allocator *allocator, size_t size)
{
    return allocator && allocator->allocate ? allocator->allocate(allocator->user, size) : malloc(size);
}

void *kvl_alloc(const kvleaf_allocator *allocator, size_t count, size_t size)
{
    uint64_t bytes;
    if (!kvl_mul(count, size, &bytes) || bytes > SIZE_MAX / 2)
        return NULL;
    void *memory = allocate(allocator, bytes ? (size_t)bytes : 1);
    if (memory)
        memset(memory, 0, bytes ? (size_t)bytes : 1);
    return memory;
}

void kvl_free(const kvleaf_allocator *allocator, void *memory)
{
    if (!memory)
        return;
    if (allocator && allocator->release)
        allocator->release(allocator->user, memory);
    else
        free(memory);
}

bool kvl_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    *out = a * b;
    return (a | b) >> 32 == 0 || a == 0 || *out / a == b; /* mostly without the division, which takes its time */
}

bool kvl_add(uint64_t a, uint64_t b, uint64_t *out)
{
    *out = a + b;
    return *out >= a;
}

void kvl_log(const kvl_logger *logger, kvleaf_log_level level, const char *format, ...)
{
    if (!logger || !logger->log || level > logger->level)
        return;
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    logger->log(logger->user, level, line);
}

static bool reserve(kvl_text *text, size_t more)
{
    if (text->failed)
        return false;
    if (text->capacity - text->size > more)
        return true;
    size_t capacity = text->capacity ? text->capacity : 256;
    while (capacity - text->size <= more)
        capacity *= 2;
    char *data = kvl_alloc(text->allocator, capacity, 1);
    if (!data) {
        text->failed = true;
        return false;
    }
    if (text->size)
        memcpy(data, text->data, text->size);
    kvl_free(text->allocator, text->data);
    text->data = data;
    text->capacity = capacity;
    return true;
}

void kvl_text_append(kvl_text *text, const char *data, size_t size)
{
    if (!reserve(text, size))
        return;
    memcpy(text->data + text->size, data, size);
    text->size += size;
    text->data[text->size] = 0;
}

void kvl_text_format(kvl_text *text, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int size = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (size >= 0 && reserve(text, (size_t)size)) {
        vsnprintf(text->data + text->size, (size_t)size + 1, format, again);
        text->size += (size_t)size;
    }
    va_end(again);
}

void kvl_text_free(kvl_text *text)
{
    kvl_free(text->allocator, text->data);
    text->data = NULL;
    text->size = text->capacity = 0;
}

bool kvl_glob(const char *pattern, const char *text)
{
    const char *star = NULL, *resume = NULL;
    while (*text) {
        if (*pattern == '*') {
            star = pattern++;
            resume = text;
        } else if (*pattern == '?' || *pattern == *text) {
            pattern++;
            text++;
        } else if (star) {
            pattern = star + 1;
            text = ++resume;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return *pattern == 0;
}
