/* Preloaded into a process: a file system without flock, fcntl locks, hard links and fsync of folders. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static int refuse(const char *call, int error) {
    const char *log = getenv("REFUSED_LOG");
    FILE *file = log ? fopen(log, "a") : NULL;
    if (file) { fprintf(file, "%s\n", call); fclose(file); }
    errno = error;
    return -1;
}

int flock(int fd, int operation) { return refuse("flock", ENOSYS); }
int link(const char *from, const char *to) { return refuse("link", EPERM); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return refuse("link", EPERM); }

int fsync(int fd) {
    static int (*next)(int);
    if (!next) next = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    struct stat status;
    const char *error = getenv("FSYNC_ERROR");
    if (fstat(fd, &status) == 0 && S_ISDIR(status.st_mode)) return refuse("fsync", error ? atoi(error) : EINVAL);
    return next(fd);
}
