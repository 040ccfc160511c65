/*
 * status.c - what an error is called, and the version.
 */
#include "base/base.h"

#include <stdarg.h>
#include <stdio.h>

#define STRINGIFY_(x) #x
#define STRINGIFY(x) STRINGIFY_(x)

const char *oscar_version(void) {
    return STRINGIFY(OSCAR_VERSION_MAJOR) "." STRINGIFY(OSCAR_VERSION_MINOR) "." STRINGIFY(OSCAR_VERSION_PATCH);
}

const char *oscar_status_string(oscar_status status) {
    switch (status) {
    case OSCAR_OK: return "success";
    case OSCAR_ERROR_ARGUMENT: return "invalid argument";
    case OSCAR_ERROR_MEMORY: return "out of memory";
    case OSCAR_ERROR_IO: return "input or output failed";
    case OSCAR_ERROR_FORMAT: return "malformed file";
    case OSCAR_ERROR_MISMATCH: return "made for another model, geometry, rotation or recipe";
    case OSCAR_ERROR_UNSUPPORTED: return "not supported by this build";
    case OSCAR_ERROR_NO_SPACE: return "the page pool is full";
    case OSCAR_ERROR_NOT_FINITE: return "NaN or infinity in the data";
    case OSCAR_ERROR_INTERNAL: return "internal error";
    }
    return "unknown status";
}

oscar_status error_set(oscar_error *error, oscar_status status, int64_t position,
                       const char *format, ...) {
    if (!error) return status;
    error->status = status;
    error->position = position;
    va_list args;
    va_start(args, format);
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    return status;
}
