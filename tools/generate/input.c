/* SPDX-License-Identifier: Apache-2.0 */
#include "input.h"

#include <ctype.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIRST_CAPACITY = 1 << 16 };

static bool grow(input *in, failure *error)
{
    if (in->used + 1 < in->capacity)
        return true;
    size_t larger = in->capacity ? in->capacity * 2 : FIRST_CAPACITY;
    char *grown = realloc(in->text, larger);
    if (grown == NULL)
        return fail(error, "KVLEAF_NO_MEMORY", "no memory for line %lld of the requests", (long long)in->line + 1);
    in->text = grown;
    in->capacity = larger;
    return true;
}

static void drop_taken(input *in)
{
    in->used -= in->taken;
    if (in->used > 0)
        memmove(in->text, in->text + in->taken, in->used);
    in->taken = 0;
}

bool input_fill(input *in, bool wait, failure *error)
{
    drop_taken(in);
    while (!in->ended) {
        struct pollfd at = {.fd = in->descriptor, .events = POLLIN};
        int there = poll(&at, 1, wait ? -1 : 0);
        if (there == 0)
            return true;
        if (!grow(in, error))
            return false;
        ssize_t got = there < 0 ? -1 : read(in->descriptor, in->text + in->used, in->capacity - in->used - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail(error, "KVLEAF_INVALID", "the requests can't be read: %s", strerror(errno));
        in->ended = got == 0;
        in->used += (size_t)got;
        wait = false;
    }
    return true;
}

static bool blank(const char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    return *text == '\0';
}

char *input_line(input *in)
{
    while (in->taken < in->used) {
        char *text = in->text + in->taken, *end = memchr(text, '\n', in->used - in->taken);
        if (end == NULL && !in->ended)
            return NULL;
        size_t length = end ? (size_t)(end - text) : in->used - in->taken;
        /* A NUL would end the text early and hide what follows. */
        for (char *at = text; (at = memchr(at, '\0', length - (size_t)(at - text))) != NULL;)
            *at = '\1';
        text[length] = '\0'; /* there is room for one more */
        in->taken += length + (end ? 1 : 0);
        in->line++;
        if (!blank(text))
            return text;
    }
    return NULL;
}

void input_release(input *in)
{
    free(in->text);
    *in = (input){0};
}
