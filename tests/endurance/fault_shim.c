/* Loaded before the C library: watches the calls that touch files below one folder, and spoils one of them.
 *
 * Every such call is counted and written to a log, one line each: its name, the file's inode or 0, and its paths,
 * separated by tabs. The call with the due number is refused, cut in half, the last one that the process makes, or
 * waits until somebody wakes the process; in the log stands `!` before it. On a disk that has become full, all that would take space fails from then on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum action { PASS, REFUSE, FILL, KILL, KILL_HALFWAY, PAUSE };

static char root[PATH_MAX];
static size_t root_len;
static int log_fd = -1, armed_action, armed_error, is_full;
static long due, seen;

/* Spoils call number `number` (from 1) below `folder` by `action`; `error` is the errno of a refusal. */
void fault_arm(const char *folder, const char *log, long number, int action, int error)
{
    snprintf(root, sizeof root, "%s/", folder);
    root_len = strlen(root);
    log_fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    due = number, armed_action = action, armed_error = error, seen = 0, is_full = 0;
}

static int is_below(const char *path)
{
    return log_fd >= 0 && strncmp(path, root, root_len) == 0;
}

/* The path of a descriptor; empty when it has none. */
static void path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static void resolve(int folder, const char *name, char *path)
{
    char base[PATH_MAX] = "";
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
        return;
    }
    if (folder == AT_FDCWD)
        syscall(SYS_getcwd, base, sizeof base);
    else
        path_of(folder, base);
    snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
}

static void note(const char *call, unsigned long inode, const char *path, const char *other, int is_due)
{
    char line[2 * PATH_MAX];
    int length = snprintf(line, sizeof line, "%s%s\t%lu\t%.3000s\t%.3000s\n", is_due ? "!" : "", call, inode, path, other);
    syscall(SYS_write, log_fd, line, length);
}

static void signal_self(int signal)
{
    syscall(SYS_kill, (int)syscall(SYS_getpid), signal);
}

/* What is to happen to this call. */
static enum action meet(const char *call, int takes_space, unsigned long inode, const char *path, const char *other)
{
    int is_due = ++seen == due;
    note(call, inode, path, other, is_due);
    if (is_full && takes_space) {
        errno = ENOSPC;
        return REFUSE;
    }
    if (!is_due)
        return PASS;
    if (armed_action == PAUSE) {
        signal_self(SIGSTOP);
        return PASS;
    }
    if (armed_action == FILL)
        is_full = 1;
    errno = armed_action == FILL ? ENOSPC : armed_error;
    return armed_action;
}

static unsigned long inode_of(int fd)
{
    struct stat found;
    return fstat(fd, &found) ? 0 : (unsigned long)found.st_ino;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A call that happens or does not. */
#define WHOLE(call, takes_space, inode, path, other, failed, real_call)                \
    do {                                                                               \
        enum action action = meet(call, takes_space, inode, path, other);              \
        if (action == REFUSE || (action == FILL && (takes_space)))                     \
            return failed;                                                             \
        __typeof__(real_call) result = real_call;                                      \
        if (action == KILL || action == KILL_HALFWAY)                            \
            signal_self(SIGKILL);                                                                     \
        return result;                                                                 \
    } while (0)

static int open_at(int folder, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    resolve(folder, name, path);
    if (!is_below(path))
        return (int)syscall(SYS_openat, folder, name, flags, mode);
    int creates = (flags & O_CREAT) && syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0;
    WHOLE(creates ? "create" : "open", creates, 0, path, "", -1, (int)syscall(SYS_openat, folder, name, flags, mode));
}

#define MODE(flags)                                                                    \
    mode_t mode = 0;                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                             \
        va_list rest;                                                                  \
        va_start(rest, flags);                                                         \
        mode = va_arg(rest, mode_t);                                                   \
        va_end(rest);                                                                  \
    }

int open(const char *name, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return open_at(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return open_at(folder, name, flags, mode); }

ssize_t write(int fd, const void *bytes, size_t count)
{
    char path[PATH_MAX];
    path_of(fd, path);
    if (!is_below(path))
        return syscall(SYS_write, fd, bytes, count);
    enum action action = meet("write", 1, inode_of(fd), path, "");
    if (action == REFUSE)
        return -1;
    if (action == FILL || action == KILL_HALFWAY) {
        ssize_t written = count > 1 ? syscall(SYS_write, fd, bytes, count / 2) : -1;
        if (action == KILL_HALFWAY)
            signal_self(SIGKILL);
        errno = ENOSPC;
        return written;
    }
    ssize_t written = syscall(SYS_write, fd, bytes, count);
    if (action == KILL)
        signal_self(SIGKILL);
    return written;
}

static int is_file_below(int fd, char *path)
{
    path_of(fd, path);
    return is_below(path);
}

ssize_t read(int fd, void *bytes, size_t count)
{
    char path[PATH_MAX];
    if (!is_file_below(fd, path))
        return syscall(SYS_read, fd, bytes, count);
    WHOLE("read", 0, 0, path, "", -1, syscall(SYS_read, fd, bytes, count));
}

ssize_t pread(int fd, void *bytes, size_t count, off_t at)
{
    char path[PATH_MAX];
    if (!is_file_below(fd, path))
        return syscall(SYS_pread64, fd, bytes, count, at);
    WHOLE("read", 0, 0, path, "", -1, syscall(SYS_pread64, fd, bytes, count, at));
}

ssize_t pread64(int fd, void *bytes, size_t count, off64_t at) { return pread(fd, bytes, count, at); }

int close(int fd)
{
    char path[PATH_MAX];
    if (!is_file_below(fd, path))
        return (int)syscall(SYS_close, fd);
    enum action action = meet("close", 0, 0, path, "");
    int error = errno;
    int result = (int)syscall(SYS_close, fd);
    if (action == KILL || action == KILL_HALFWAY)
        signal_self(SIGKILL);
    if (action != REFUSE)
        return result;
    errno = error;
    return -1;
}

int fsync(int fd)
{
    char path[PATH_MAX];
    if (!is_file_below(fd, path))
        return (int)syscall(SYS_fsync, fd);
    /* What a power cut would cost is told from the log; syncing in earnest would only cost time. */
    WHOLE("fsync", 0, inode_of(fd), path, "", -1, 0);
}

void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
    char path[PATH_MAX] = "";
    if (fd < 0 || (flags & MAP_ANONYMOUS) || !is_file_below(fd, path))
        return (void *)syscall(SYS_mmap, at, length, protection, flags, fd, offset);
    WHOLE("mmap", 0, 0, path, "", MAP_FAILED, (void *)syscall(SYS_mmap, at, length, protection, flags, fd, offset));
}

void *mmap64(void *at, size_t length, int protection, int flags, int fd, off64_t offset)
{
    return mmap(at, length, protection, flags, fd, offset);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags)
{
    char source[PATH_MAX], target[PATH_MAX];
    resolve(from_folder, from, source), resolve(to_folder, to, target);
    if (!is_below(target))
        return (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
    WHOLE("link", 1, 0, source, target, -1, (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags));
}

int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    char source[PATH_MAX], target[PATH_MAX];
    resolve(from_folder, from, source), resolve(to_folder, to, target);
    if (!is_below(target))
        return (int)syscall(SYS_renameat, from_folder, from, to_folder, to);
    int replaces = syscall(SYS_faccessat, AT_FDCWD, target, F_OK) == 0;
    WHOLE(replaces ? "replace" : "rename", 0, 0, source, target, -1,
          (int)syscall(SYS_renameat, from_folder, from, to_folder, to));
}

int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int folder, const char *name, int flags)
{
    char path[PATH_MAX];
    resolve(folder, name, path);
    if (!is_below(path))
        return (int)syscall(SYS_unlinkat, folder, name, flags);
    WHOLE("remove", 0, 0, path, "", -1, (int)syscall(SYS_unlinkat, folder, name, flags));
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    resolve(folder, name, path);
    if (!is_below(path))
        return (int)syscall(SYS_mkdirat, folder, name, mode);
    int creates = syscall(SYS_faccessat, AT_FDCWD, path, F_OK) != 0;
    WHOLE(creates ? "mkdir" : "open", creates, 0, path, "", -1, (int)syscall(SYS_mkdirat, folder, name, mode));
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

DIR *opendir(const char *name)
{
    char path[PATH_MAX];
    resolve(AT_FDCWD, name, path);
    if (!is_below(path))
        return REAL(opendir)(name);
    WHOLE("list", 0, 0, path, "", NULL, REAL(opendir)(name));
}
