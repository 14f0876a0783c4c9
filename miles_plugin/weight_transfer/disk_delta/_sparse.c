/* What `sparse.py` does to each value of a tensor, without the interpreter's lock. `sparse_numpy.py` does the same.
 *
 * Nothing here trusts its arguments, but for the addresses of a hash: sizes are compared here and indices where they are
 * used (`_values.h`), and what does not agree is a ValueError. Only the stable interface of Python 3.11 is used: one build
 * serves every later version. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include "_values.h"

#define STEP_BYTES ((size_t)128 << 10) /* of a tensor, a multiple of every width */

/* As XXH3_128bits_update. */
typedef int (*Update)(void *state, const void *data, size_t nbytes);

typedef struct {
    size_t nbytes, block, enough; /* enough: changes, with which it ends */
    uint32_t *positions;
    Update update;
    void *state;
    size_t done, skipped; /* bytes; skipped: before the first block that has changes */
    Collected to;
} Scanned;

/* 1, or 0 with an exception. */
static int is_width(Py_ssize_t width)
{
    if (width == 1 || width == 2 || width == 4 || width == 8)
        return 1;
    PyErr_Format(PyExc_ValueError, "values have %zd bytes, allowed are 1, 2, 4, 8", width);
    return 0;
}

/* Release `count` buffers; the result, or ValueError if there is none. */
static PyObject *finished(Py_buffer *buffers, int count, PyObject *result)
{
    while (count > 0)
        PyBuffer_Release(&buffers[--count]);
    if (result == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "sizes, indices and the bytes between them do not agree");
    return result;
}

static PyObject *changes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[3], *old = b, *new = b + 1, *out = b + 2;
    Py_ssize_t width;
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(arguments, "y*y*nw*", old, new, &width, out))
        return NULL;
    if (is_width(width) && old->len == new->len && old->len % width == 0 && old->len / width <= UINT32_MAX &&
        out->len / (Py_ssize_t)sizeof(uint32_t) >= old->len / width + SLACK) {
        size_t found;
        Py_BEGIN_ALLOW_THREADS
        found = FOR_WIDTH(width, find_changes, old->buf, new->buf, (size_t)(old->len / width), out->buf);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(found);
    }
    return finished(b, 3, result);
}

/* Block by block: what comes from memory is compared, copied and hashed while it is in the core's own cache. */
static int scan_blocks(Py_ssize_t width, char *old, const char *new, Scanned *s)
{
    int agreed = 1;

    for (size_t size; agreed && s->done < s->nbytes && s->to.changed < s->enough; s->done += size) {
        size = s->nbytes - s->done < s->block ? s->nbytes - s->done : s->block;
        s->to.values = size / (size_t)width;
        s->to.count = FOR_WIDTH(width, find_changes, old + s->done, new + s->done, s->to.values, s->positions);
        if (2 * s->to.count > s->to.values) /* as DENSE_SHARE in kernels.py */
            break;
        if (s->to.count == 0) {
            s->to.since += s->to.values;
        } else {
            if (s->to.changed == 0) {
                s->skipped = s->done;
                s->to.since = 0;
            }
            agreed = FOR_WIDTH(width, collect_changes, old + s->done, new + s->done, &s->to);
        }
        if (agreed && s->update != NULL)
            s->update(s->state, new + s->done, size);
    }
    return agreed;
}

static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[6], *old = b, *new = b + 1, *places = b + 2, *gaps = b + 3, *nibbles = b + 4, *escapes = b + 5;
    Py_ssize_t width, block, changed, escaped, since, enough;
    unsigned long long update, state;
    PyObject *result = NULL;

    if (!PyArg_ParseTuple(arguments, "w*y*nnw*nw*w*w*nnnKK", old, new, &width, &block, places, &since, gaps, nibbles,
                          escapes, &changed, &escaped, &enough, &update, &state))
        return NULL;
    if (is_width(width) && old->len == new->len && old->len % width == 0 && block > 0 && block % width == 0 &&
        block / width <= UINT32_MAX && since >= 0 && changed >= 0 && escaped >= 0 && enough >= 0 &&
        places->len / (Py_ssize_t)sizeof(uint32_t) >= (old->len < block ? old->len : block) / width + SLACK) {
        Scanned s = {
            .nbytes = (size_t)old->len, .block = (size_t)block, .enough = (size_t)enough, .positions = places->buf,
            .update = (Update)(uintptr_t)update, .state = (void *)(uintptr_t)state,
            .to = {
                .positions = places->buf, .since = (uint64_t)since,
                .gaps = gaps->buf, .nibbles = nibbles->buf, .escapes = escapes->buf,
                .changed = (size_t)changed, .most_changed = (size_t)gaps->len / sizeof(uint32_t),
                .escaped = (size_t)escaped, .most_escaped = (size_t)(escapes->len / width),
            },
        };
        int agreed = 0;
        if (s.to.changed <= s.to.most_changed && (size_t)nibbles->len >= (s.to.most_changed + 1) / 2) {
            Py_BEGIN_ALLOW_THREADS
            agreed = scan_blocks(width, old->buf, new->buf, &s);
            Py_END_ALLOW_THREADS
        }
        if (agreed)
            result = Py_BuildValue("(nnnnn)", (Py_ssize_t)s.done, (Py_ssize_t)s.skipped, (Py_ssize_t)s.to.changed,
                                   (Py_ssize_t)s.to.escaped, (Py_ssize_t)s.to.since);
    }
    return finished(b, 6, result);
}

static PyObject *symbols(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[3], *gaps = b, *out = b + 1, *lows = b + 2;
    size_t used = 0;

    if (!PyArg_ParseTuple(arguments, "y*w*w*", gaps, out, lows))
        return NULL;
    const uint32_t *gap = gaps->buf;
    uint8_t *symbol = out->buf, *low = lows->buf;
    size_t count = (size_t)gaps->len / sizeof *gap, room = (size_t)out->len;
    int agreed = lows->len == 0 || (size_t)lows->len == count;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; agreed && i < count; i++) {
        uint32_t left = gap[i];
        if (lows->len) {
            low[i] = (uint8_t)left;
            left >>= 8;
        }
        agreed = left / MORE < room - used;
        if (agreed) {
            for (; left >= MORE; left -= MORE)
                symbol[used++] = MORE;
            symbol[used++] = (uint8_t)left;
        }
    }
    Py_END_ALLOW_THREADS
    return finished(b, 3, agreed ? PyLong_FromSize_t(used) : NULL);
}

static PyObject *positions(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[3], *in = b, *lows = b + 1, *out = b + 2;
    Py_ssize_t limit;
    uint64_t after = 0;
    size_t used = 0;

    if (!PyArg_ParseTuple(arguments, "y*y*nw*", in, lows, &limit, out))
        return NULL;
    const uint8_t *symbol = in->buf, *low = lows->buf;
    uint32_t *position = out->buf;
    size_t count = (size_t)out->len / sizeof *position, most = (size_t)in->len;
    int agreed = limit >= 0 && (uint64_t)limit <= UINT32_MAX && (lows->len == 0 || (size_t)lows->len == count);
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; agreed && i < count; i++) {
        uint64_t gap = 0;
        while (used < most && symbol[used] == MORE) {
            gap += MORE;
            used++;
        }
        agreed = used < most;
        if (agreed) {
            gap += symbol[used++];
            after += lows->len ? gap << 8 | low[i] : gap;
            agreed = after < (uint64_t)limit;
            position[i] = (uint32_t)after++;
        }
    }
    Py_END_ALLOW_THREADS
    return finished(b, 3, agreed && used == most ? PyLong_FromUnsignedLongLong(after) : NULL);
}

/* Step by step: what comes from memory is hashed while it is in the core's own cache. */
static int patch_in_steps(Py_ssize_t width, char *block, size_t nbytes, Patched *from, int touch, Update update,
                          void *state)
{
    int agreed = 1;

    for (size_t at = 0, size; agreed && at < nbytes; at += size) {
        size = nbytes - at < STEP_BYTES ? nbytes - at : STEP_BYTES;
        /* Read in order it comes faster than line by line as changes fall. */
        for (size_t i = 0; touch && i < size; i += 64)
            (void)*((volatile const char *)block + at + i);
        from->values = size / (size_t)width;
        agreed = FOR_WIDTH(width, patch_values, block + at, from);
        from->base += from->values;
        if (agreed && update != NULL)
            update(state, block + at, size);
    }
    return agreed;
}

static PyObject *patch(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[4], *block = b, *places = b + 1, *nibbles = b + 2, *escapes = b + 3;
    Py_ssize_t width, base, changed, escaped;
    unsigned long long update, state;
    PyObject *result = NULL;
    int touch, agreed = 0;

    if (!PyArg_ParseTuple(arguments, "w*nny*y*y*nnpKK", block, &width, &base, places, nibbles, escapes, &changed,
                          &escaped, &touch, &update, &state))
        return NULL;
    if (is_width(width) && base >= 0 && changed >= 0 && escaped >= 0) {
        Patched from = {
            .base = (uint64_t)base,
            .positions = places->buf, .nibbles = nibbles->buf, .escapes = escapes->buf,
            .changed = (size_t)changed, .most_changed = (size_t)places->len / sizeof(uint32_t),
            .escaped = (size_t)escaped, .most_escaped = (size_t)(escapes->len / width),
        };
        if ((size_t)nibbles->len >= (from.most_changed + 1) / 2) {
            Py_BEGIN_ALLOW_THREADS
            agreed = patch_in_steps(width, block->buf, (size_t)block->len, &from, touch, (Update)(uintptr_t)update,
                                    (void *)(uintptr_t)state);
            Py_END_ALLOW_THREADS
        }
        if (agreed)
            result = Py_BuildValue("(nn)", (Py_ssize_t)from.changed, (Py_ssize_t)from.escaped);
    }
    return finished(b, 4, result);
}

static PyObject *spread(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[3], *old = b, *new = b + 1, *planes = b + 2;
    Py_ssize_t width;
    int agreed;

    if (!PyArg_ParseTuple(arguments, "w*y*nw*", old, new, &width, planes))
        return NULL;
    agreed = is_width(width) && old->len == new->len && old->len == planes->len && old->len % width == 0;
    if (agreed) {
        Py_BEGIN_ALLOW_THREADS
        FOR_WIDTH(width, spread_planes, old->buf, new->buf, (size_t)(old->len / width), planes->buf);
        Py_END_ALLOW_THREADS
    }
    return finished(b, 3, agreed ? Py_NewRef(Py_None) : NULL);
}

static PyObject *unspread(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer b[2], *block = b, *planes = b + 1;
    Py_ssize_t width;
    int agreed;

    if (!PyArg_ParseTuple(arguments, "w*y*n", block, planes, &width))
        return NULL;
    agreed = is_width(width) && block->len == planes->len && block->len % width == 0;
    if (agreed) {
        Py_BEGIN_ALLOW_THREADS
        FOR_WIDTH(width, add_planes, block->buf, (size_t)(block->len / width), planes->buf);
        Py_END_ALLOW_THREADS
    }
    return finished(b, 2, agreed ? Py_NewRef(Py_None) : NULL);
}

/* What each does is said in _sparse.pyi. */
static PyMethodDef methods[] = {
    {"changes", changes, METH_VARARGS, "changes(old, new, width, out)\n--\n\n"},
    {"scan", scan, METH_VARARGS,
     "scan(old, new, width, block, positions, since, gaps, nibbles, escapes, changed, escaped, enough, update, state)"
     "\n--\n\n"},
    {"symbols", symbols, METH_VARARGS, "symbols(gaps, out, lows)\n--\n\n"},
    {"positions", positions, METH_VARARGS, "positions(symbols, lows, limit, out)\n--\n\n"},
    {"patch", patch, METH_VARARGS,
     "patch(block, width, base, positions, nibbles, escapes, changed, escaped, touch, update, state)\n--\n\n"},
    {"spread", spread, METH_VARARGS, "spread(old, new, width, planes)\n--\n\n"},
    {"unspread", unspread, METH_VARARGS, "unspread(block, planes, width)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sparse", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sparse(void)
{
    return PyModule_Create(&module);
}
