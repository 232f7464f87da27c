/* Preloaded: gloo's threads wait 2 ms before each lock, so that what a collective leaves behind is dropped late. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    static int (*real)(pthread_mutex_t *);
    char name[16] = "";
    if (!real) real = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    prctl(PR_GET_NAME, name, 0, 0, 0);
    if (!strcmp(name, "pt_gloo_runloop")) usleep(2000);
    return real(mutex);
}
