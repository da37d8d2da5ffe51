/* SPDX-License-Identifier: Apache-2.0 */
/* The only file that talks to the operating system. */
#define _POSIX_C_SOURCE 200809L
#include "base/base.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_SIZE 4096

bool kvl_file_read(const kvleaf_allocator *allocator, const char *path, char **data, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return false;
    char *bytes = NULL;
    long length = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
    if (length >= 0 && fseek(file, 0, SEEK_SET) == 0)
        bytes = kvl_alloc(allocator, (size_t)length + 1, 1);
    bool whole = bytes && fread(bytes, 1, (size_t)length, file) == (size_t)length;
    fclose(file);
    if (!whole) {
        kvl_free(allocator, bytes);
        return false;
    }
    *data = bytes;
    *size = (size_t)length;
    return true;
}

bool kvl_file_replace(const char *path, const void *data, size_t size)
{
    char beside[PATH_SIZE];
    int length = snprintf(beside, sizeof beside, "%s.XXXXXX", path);
    if (length < 0 || length >= PATH_SIZE)
        return false;
    int descriptor = mkstemp(beside);
    if (descriptor < 0)
        return false;
    FILE *file = fdopen(descriptor, "wb");
    if (!file) {
        close(descriptor);
        unlink(beside);
        return false;
    }
    bool written = fwrite(data, 1, size, file) == size;
    written = fclose(file) == 0 && written;
    if (written && rename(beside, path) == 0)
        return true;
    unlink(beside);
    return false;
}

void kvl_file_remove(const char *path)
{
    unlink(path);
}

bool kvl_folder_make(const char *path)
{
    char part[PATH_SIZE];
    if (strlen(path) >= sizeof part)
        return false;
    strcpy(part, path);
    for (char *at = part + 1; *at; at++) {
        if (*at != '/')
            continue;
        *at = 0;
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return false;
        *at = '/';
    }
    return mkdir(part, 0700) == 0 || errno == EEXIST;
}

struct kvl_mutex {
    pthread_mutex_t mutex;
};

kvl_mutex *kvl_mutex_create(const kvleaf_allocator *allocator)
{
    kvl_mutex *mutex = kvl_alloc(allocator, 1, sizeof *mutex);
    if (mutex && pthread_mutex_init(&mutex->mutex, NULL) != 0) {
        kvl_free(allocator, mutex);
        mutex = NULL;
    }
    return mutex;
}

void kvl_mutex_destroy(const kvleaf_allocator *allocator, kvl_mutex *mutex)
{
    if (!mutex)
        return;
    pthread_mutex_destroy(&mutex->mutex);
    kvl_free(allocator, mutex);
}

void kvl_mutex_lock(kvl_mutex *mutex)
{
    pthread_mutex_lock(&mutex->mutex);
}

void kvl_mutex_unlock(kvl_mutex *mutex)
{
    pthread_mutex_unlock(&mutex->mutex);
}
