/* Preloaded into a process: once armed, kills it (SIGKILL) just before its n-th call that changes files. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long armed_at = 0, calls = 0;

void arm(long at) { armed_at = at; calls = 0; }
long counted(void) { return calls; }

static void pass(void) {
    if (armed_at == 0) return;
    if (++calls == armed_at) kill(getpid(), SIGKILL);
}

#define NEXT(name) static typeof(name) *next; if (!next) next = (typeof(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) { NEXT(write); if (fd > 2) pass(); return next(fd, data, size); }
ssize_t writev(int fd, const struct iovec *parts, int n) { NEXT(writev); if (fd > 2) pass(); return next(fd, parts, n); }
int fsync(int fd) { NEXT(fsync); pass(); return next(fd); }
int rename(const char *from, const char *to) { NEXT(rename); pass(); return next(from, to); }
int renameat(int a, const char *from, int b, const char *to) { NEXT(renameat); pass(); return next(a, from, b, to); }
int unlink(const char *path) { NEXT(unlink); pass(); return next(path); }
int unlinkat(int folder, const char *path, int flags) { NEXT(unlinkat); pass(); return next(folder, path, flags); }
int rmdir(const char *path) { NEXT(rmdir); pass(); return next(path); }
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); pass(); return next(path, mode); }

static int mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0; }

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        NEXT(name); va_list rest; va_start(rest, flags); int mode = mode_of(flags, rest); va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC)) pass(); \
        return next(path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
