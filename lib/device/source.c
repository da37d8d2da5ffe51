/* SPDX-License-Identifier: Apache-2.0 */
/* Kernel sources: found in the embedded table or in a folder, and their includes expanded, since a driver has no folder
 * to look in. */
#include "device/program.h"
#include "device/source.h"

#include <stdio.h>
#include <string.h>

enum { MAX_FILES = 32, NAME_SIZE = 128 };

typedef struct expansion {
    const kvleaf_device *device;
    kvl_text *out;
    int count;
    char names[MAX_FILES][NAME_SIZE]; /* files already in the text */
} expansion;

/* A source name is relative and stays below cl_kernels/. */
static bool name_is_safe(const char *name)
{
    return name[0] != 0 && name[0] != '/' && strlen(name) < NAME_SIZE && !strstr(name, "..") &&
           !strpbrk(name, "\\:\"\n");
}

static kvleaf_status load(const kvleaf_device *device, const char *name, char **owned, const char **text, size_t *size)
{
    if (device->kernel_dir) {
        kvl_text path = {.allocator = &device->allocator};
        kvl_text_format(&path, "%s/%s", device->kernel_dir, name);
        bool found = !path.failed && kvl_file_read(&device->allocator, path.data, owned, size);
        kvl_text_free(&path);
        *text = *owned;
        return found ? KVLEAF_OK
                     : kvl_fail(KVLEAF_INVALID, "kernel_dir", 0, 0, "kernel source %s can't be read from kernel_dir %s",
                                name, device->kernel_dir);
    }
    for (int i = 0; i < kvl_source_count; i++) {
        if (strcmp(kvl_sources[i].name, name) == 0) {
            *text = kvl_sources[i].text;
            *size = kvl_sources[i].size;
            return KVLEAF_OK;
        }
    }
    return kvl_fail(KVLEAF_INVALID, "file", 0, 0, "kernel source %s is not among the embedded ones", name);
}

/* What a line is to the expander. */
typedef enum line_kind { LINE_TEXT, LINE_INCLUDE, LINE_LINE } line_kind;

static const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    return at;
}

static bool starts(const char *at, const char *end, const char *word)
{
    size_t length = strlen(word);
    return (size_t)(end - at) >= length && memcmp(at, word, length) == 0;
}

static line_kind classify(const char *at, const char *end, char name[NAME_SIZE])
{
    at = skip_blanks(at, end);
    if (at == end || *at != '#')
        return LINE_TEXT;
    at = skip_blanks(at + 1, end);
    if (starts(at, end, "line"))
        return LINE_LINE;
    if (!starts(at, end, "include"))
        return LINE_TEXT;
    at = skip_blanks(at + strlen("include"), end);
    if (at == end || *at != '"')
        return LINE_TEXT;
    const char *close = memchr(at + 1, '"', (size_t)(end - at - 1));
    size_t length = close ? (size_t)(close - at - 1) : 0;
    if (!close || length >= NAME_SIZE)
        return LINE_TEXT;
    memcpy(name, at + 1, length);
    name[length] = 0;
    return LINE_INCLUDE;
}

/* Whether a block comment is open after the line, given whether one was before it. */
static bool comment_after(const char *at, const char *end, bool open)
{
    for (; at + 1 < end; at++) {
        if (open && at[0] == '*' && at[1] == '/') {
            open = false;
            at++;
        } else if (!open && at[0] == '/' && at[1] == '/') {
            return false;
        } else if (!open && at[0] == '/' && at[1] == '*') {
            open = true;
            at++;
        }
    }
    return open;
}

static kvleaf_status expand(expansion *e, const char *name);

/* Copies a file's text line by line. A file's own #line directive becomes an empty line: the true number is ours to
 * give. */
static kvleaf_status expand_text(expansion *e, const char *name, const char *text, size_t size)
{
    const char *end = text + size;
    bool comment = false;
    kvl_text_format(e->out, "#line 1 \"cl_kernels/%s\"\n", name);
    for (int number = 1; text < end; number++) {
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        const char *stop = newline ? newline : end;
        char included[NAME_SIZE];
        line_kind kind = comment ? LINE_TEXT : classify(text, stop, included);
        if (kind == LINE_INCLUDE) {
            kvleaf_status status = expand(e, included);
            if (status != KVLEAF_OK)
                return status;
            kvl_text_format(e->out, "#line %d \"cl_kernels/%s\"\n", number + 1, name);
        } else {
            if (kind == LINE_TEXT)
                kvl_text_append(e->out, text, (size_t)(stop - text));
            kvl_text_append(e->out, "\n", 1);
        }
        comment = comment_after(text, stop, comment);
        text = stop + 1;
    }
    return KVLEAF_OK;
}

static kvleaf_status expand(expansion *e, const char *name)
{
    if (!name_is_safe(name))
        return kvl_fail(KVLEAF_INVALID, "file", 0, 0, "kernel source name \"%s\" leaves the kernel folder", name);
    for (int i = 0; i < e->count; i++) {
        if (strcmp(e->names[i], name) == 0)
            return KVLEAF_OK;
    }
    if (e->count == MAX_FILES)
        return kvl_fail(KVLEAF_INVALID, "file", e->count + 1, MAX_FILES, "a kernel includes more than %d files",
                        MAX_FILES);
    snprintf(e->names[e->count++], NAME_SIZE, "%s", name);
    char *owned = NULL;
    const char *text = NULL;
    size_t size = 0;
    kvleaf_status status = load(e->device, name, &owned, &text, &size);
    if (status == KVLEAF_OK)
        status = expand_text(e, name, text, size);
    kvl_free(&e->device->allocator, owned);
    return status;
}

kvleaf_status kvl_source_expand(const kvleaf_device *device, const char *file, kvl_text *out)
{
    expansion *e = kvl_alloc(&device->allocator, 1, sizeof *e);
    if (!e)
        return kvl_fail_memory(sizeof *e);
    e->device = device;
    e->out = out;
    kvleaf_status status = expand(e, file);
    kvl_free(&device->allocator, e);
    if (status == KVLEAF_OK && out->failed)
        status = kvl_fail_memory(out->capacity * 2);
    return status;
}
