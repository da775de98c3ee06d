// Loaded before a program (LD_PRELOAD), counts what it writes under one folder: writes, renames and files opened for
// writing, whoever asks: Python, safetensors, torch. From the chosen one on each fails with the chosen error, or the
// process is killed in place of it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static long seen, first;
static int error_number; // 0: killed

// Faults under `under` begin at the `at`-th write (1 is the first; 0: never); counting begins anew.
void faults_arm(const char *under, long at, int number) {
    strncpy(folder, under, sizeof folder - 1);
    seen = 0, first = at, error_number = number;
}

long faults_seen(void) { return seen; }

static int inside(const char *path) {
    if (!folder[0] || !path) return 0;
    char whole[2 * PATH_MAX];
    if (path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", here, path);
    }
    return strncmp(whole, folder, strlen(folder)) == 0;
}

static int inside_file(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}

static int fails(void) {
    const long now = __atomic_add_fetch(&seen, 1, __ATOMIC_RELAXED);
    if (!first || now < first) return 0;
    if (!error_number) kill(getpid(), SIGKILL);
    errno = error_number;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *bytes, size_t count) {
    if (inside_file(file) && fails()) return -1;
    return REAL(write)(file, bytes, count);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    if (inside_file(file) && fails()) return -1;
    return REAL(writev)(file, parts, count);
}
ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t place) {
    if (inside_file(file) && fails()) return -1;
    return REAL(pwrite64)(file, bytes, count, place);
}
ssize_t pwrite(int file, const void *bytes, size_t count, off_t place) {
    if (inside_file(file) && fails()) return -1;
    return REAL(pwrite)(file, bytes, count, place);
}
int rename(const char *from, const char *to) {
    if (inside(to) && fails()) return -1;
    return REAL(rename)(from, to);
}

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    if ((flags & (O_WRONLY | O_RDWR)) && inside(path) && fails()) return -1;
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    return real(path, flags, mode);
}
#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = va_arg(rest, mode_t);                                                                      \
        va_end(rest);                                                                                                  \
        return opened(#name, path, flags, mode);                                                                       \
    }
OPEN(open)
OPEN(open64)
