/* SPDX-License-Identifier: Apache-2.0 */
/* The only file that talks to the operating system. */
#define _POSIX_C_SOURCE 200809L
#define _DEFAULT_SOURCE /* flock */
#include "base/base.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
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

struct kvl_file {
    const kvleaf_allocator *allocator;
    FILE *stream;
    char path[PATH_SIZE], beside[PATH_SIZE]; /* beside: empty where the file is read */
};

static bool open_beside(kvl_file *file, const char *path)
{
    int length = snprintf(file->beside, sizeof file->beside, "%s.XXXXXX", path);
    if (length < 0 || length >= PATH_SIZE)
        return false;
    strcpy(file->path, path);
    int descriptor = mkstemp(file->beside);
    if (descriptor < 0)
        return false;
    file->stream = fdopen(descriptor, "wb");
    if (file->stream)
        return true;
    close(descriptor);
    unlink(file->beside);
    return false;
}

static bool close_beside(kvl_file *file, bool keep)
{
    bool written = fclose(file->stream) == 0;
    if (keep && written && rename(file->beside, file->path) == 0)
        return true;
    unlink(file->beside);
    return false;
}

bool kvl_file_write(kvl_file *file, const void *data, size_t size)
{
    return fwrite(data, 1, size, file->stream) == size;
}

bool kvl_file_replace(const char *path, const void *data, size_t size)
{
    kvl_file file = {0};
    return open_beside(&file, path) && close_beside(&file, kvl_file_write(&file, data, size));
}

static kvleaf_status fail_path(const char *path, const char *what)
{
    return kvl_fail(KVLEAF_INVALID, "path", errno, 0, "can't %s %s: %s", what, path, strerror(errno));
}

kvleaf_status kvl_file_create(const kvleaf_allocator *allocator, const char *path, kvl_file **out)
{
    kvl_file *file = kvl_alloc(allocator, 1, sizeof *file);
    if (!file)
        return kvl_fail_memory(sizeof *file);
    errno = ENAMETOOLONG;
    if (!open_beside(file, path)) {
        kvl_free(allocator, file);
        return fail_path(path, "write");
    }
    file->allocator = allocator;
    *out = file;
    return KVLEAF_OK;
}

/* Its length, or -1 where it is none that can be read at any place. */
static off_t open_regular(kvl_file *file, const char *path)
{
    struct stat status;
    file->stream = fopen(path, "rb");
    if (!file->stream || fstat(fileno(file->stream), &status) != 0)
        return -1;
    errno = EISDIR;
    return S_ISREG(status.st_mode) ? status.st_size : -1;
}

kvleaf_status kvl_file_open(const kvleaf_allocator *allocator, const char *path, kvl_file **out, uint64_t *size)
{
    kvl_file *file = kvl_alloc(allocator, 1, sizeof *file);
    if (!file)
        return kvl_fail_memory(sizeof *file);
    file->allocator = allocator;
    off_t length = open_regular(file, path);
    if (length < 0) {
        kvleaf_status status = fail_path(path, "read");
        if (file->stream)
            fclose(file->stream);
        kvl_free(allocator, file);
        return status;
    }
    *out = file;
    *size = (uint64_t)length;
    return KVLEAF_OK;
}

bool kvl_file_read_at(kvl_file *file, uint64_t offset, void *data, size_t size)
{
    return offset <= INT64_MAX && fseeko(file->stream, (off_t)offset, SEEK_SET) == 0 &&
           fread(data, 1, size, file->stream) == size;
}

bool kvl_file_close(kvl_file *file, bool keep)
{
    if (!file)
        return false;
    bool closed = file->beside[0] ? close_beside(file, keep) : fclose(file->stream) == 0;
    kvl_free(file->allocator, file);
    return closed;
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

struct kvl_mark {
    const kvleaf_allocator *allocator;
    int descriptor; /* locked as long as it is open */
    char path[PATH_SIZE];
};

/* A byte in the file says that something goes on; the lock, that its process lives. */
bool kvl_mark_begin(const kvleaf_allocator *allocator, const char *path, kvl_mark **out)
{
    struct stat status;
    *out = NULL;
    if (strlen(path) >= PATH_SIZE)
        return true;
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (descriptor < 0)
        return true;
    if (flock(descriptor, LOCK_EX | LOCK_NB) != 0 || fstat(descriptor, &status) != 0) {
        close(descriptor);
        return true;
    }
    kvl_mark *mark = status.st_size == 0 ? kvl_alloc(allocator, 1, sizeof *mark) : NULL;
    if (!mark || write(descriptor, "1", 1) != 1) {
        kvl_free(allocator, mark);
        if (status.st_size == 0)
            unlink(path);
        close(descriptor);
        return status.st_size == 0;
    }
    *mark = (kvl_mark){.allocator = allocator, .descriptor = descriptor};
    strcpy(mark->path, path);
    *out = mark;
    return true;
}

const char *kvl_mark_path(const kvl_mark *mark)
{
    return mark->path;
}

void kvl_mark_end(kvl_mark *mark, bool leave)
{
    if (!mark)
        return;
    /* Emptied first: who opened it a moment ago must not take it for one that was left behind. */
    if (!leave && ftruncate(mark->descriptor, 0) == 0)
        unlink(mark->path);
    close(mark->descriptor);
    kvl_free(mark->allocator, mark);
}

uint64_t kvl_clock_ms(void)
{
    struct timespec now = {0};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
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
