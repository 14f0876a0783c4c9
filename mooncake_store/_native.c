/* What takes Python too long for each of a batch's rows or numbers. All of it is optional: gather.py, arrays.py and
 * tree.py do the same without.
 *
 * Only the stable interface of Python 3.11 is used: one build serves every later version. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef uint64_t (*Hash)(const void *, size_t);

/* Whether blocks that end there, in bytes, make up all of `nbytes`. */
static int fill_exactly(const Py_buffer *ends, Py_ssize_t nbytes)
{
    const int64_t *end = ends->buf;
    Py_ssize_t count = ends->len / sizeof *end;
    int64_t before = 0;

    if (ends->len % sizeof *end != 0 || (uintptr_t)ends->buf % sizeof *end != 0)
        return 0;
    for (Py_ssize_t block = 0; block < count; before = end[block++])
        if (end[block] < before)
            return 0;
    return before == nbytes;
}

/* What is fetched ahead of the copy, a place in the pieces that keeps its distance: rows are short, and the processor's
 * own prefetcher starts anew with each. */
typedef struct {
    const Py_buffer *piece, *end;
    Py_ssize_t at;
} Ahead;

enum { LINE = 64, CHUNK = 8 * LINE, DISTANCE = 32 << 10 };

static void fetch(Ahead *ahead, Py_ssize_t nbytes)
{
    while (nbytes > 0 && ahead->piece < ahead->end) {
        Py_ssize_t left = ahead->piece->len - ahead->at;
        Py_ssize_t these = left < nbytes ? left : nbytes;
        const char *from = (const char *)ahead->piece->buf + ahead->at;
        for (Py_ssize_t offset = 0; offset < these; offset += LINE)
            __builtin_prefetch(from + offset, 0, 2);
        nbytes -= these;
        ahead->at += these;
        if (ahead->at == ahead->piece->len) {
            ahead->piece++;
            ahead->at = 0;
        }
    }
}

/* A memcpy past the caches: the core need not read what it overwrites. memcpy does so itself, but only of megabytes. */
static void stream(char *out, const char *in, size_t nbytes, Ahead *ahead)
{
#ifdef __SSE2__
    size_t before = -(uintptr_t)out % LINE;

    if (nbytes >= CHUNK) {
        memcpy(out, in, before);
        for (out += before, in += before, nbytes -= before; nbytes >= CHUNK; out += CHUNK, in += CHUNK, nbytes -= CHUNK) {
            fetch(ahead, CHUNK);
            for (size_t at = 0; at < CHUNK; at += sizeof(__m128i))
                _mm_stream_si128((__m128i *)(out + at), _mm_loadu_si128((const __m128i *)(in + at)));
        }
    }
#endif
    fetch(ahead, nbytes);
    memcpy(out, in, nbytes);
}

static double now(void)
{
    struct timespec since;

    clock_gettime(CLOCK_MONOTONIC, &since);
    return since.tv_sec + since.tv_nsec * 1e-9;
}

/* Copies pieces into `out`, and digests each block while it is in the core's nearest cache. A block that is one piece
 * goes past the caches if `in_place`. Returns whether all was copied by `until`; a block that has begun is finished. */
static int copy(const Py_buffer *pieces, Py_ssize_t count, char *out, const int64_t *ends, Py_ssize_t blocks, Hash hash, uint64_t *sums,
                int in_place, double until)
{
    int64_t at = 0, start = 0;
    Py_ssize_t taken = 0;
    Ahead ahead = {pieces, pieces + count, 0};

    fetch(&ahead, DISTANCE);
    for (Py_ssize_t block = 0; block < blocks; start = ends[block++]) {
        if (now() > until)
            return 0;
        if (in_place && taken == 0 && at < ends[block] && pieces->len == ends[block] - at) {
            const Py_buffer *piece = pieces++;
            sums[block] = hash(piece->buf, piece->len);
            stream(out + at, piece->buf, piece->len, &ahead);
            at = ends[block];
            continue;
        }
        while (at < ends[block]) {
            Py_ssize_t nbytes = pieces->len - taken;
            if (nbytes > ends[block] - at)
                nbytes = ends[block] - at;
            memcpy(out + at, (const char *)pieces->buf + taken, nbytes);
            at += nbytes;
            taken += nbytes;
            if (taken == pieces->len) {
                pieces++;
                taken = 0;
            }
        }
        sums[block] = hash(out + start, ends[block] - start);
    }
    return 1;
}

/* Copies many pieces of memory into one, without the interpreter's lock, so that two threads can do it at once;
 * numpy.concatenate takes that lock again for each piece, and a digest keeps it. */
static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pieces, *into, *block_ends, *result = NULL;
    Py_buffer out, ends, *held = NULL;
    Py_ssize_t count, blocks, acquired = 0, total = 0;
    uint64_t *sums = NULL;
    unsigned long long hash;
    int in_place, in_time;
    double until;

    if (!PyArg_ParseTuple(arguments, "O!OOKpd", &PyList_Type, &pieces, &into, &block_ends, &hash, &in_place, &until))
        return NULL;
    if (PyObject_GetBuffer(into, &out, PyBUF_WRITABLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(block_ends, &ends, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&out);
        return NULL;
    }
    if (!fill_exactly(&ends, out.len)) {
        PyErr_Format(PyExc_ValueError, "blocks do not end where the %zd bytes do", out.len);
        goto done;
    }
    blocks = ends.len / sizeof(int64_t);
    count = PyList_Size(pieces);
    held = PyMem_Calloc(count ? count : 1, sizeof *held);
    sums = PyMem_Calloc(blocks ? blocks : 1, sizeof *sums);
    if (held == NULL || sums == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    /* A piece's __buffer__ may run Python code that shortens the list. */
    for (; acquired < count; acquired++) {
        PyObject *piece = PyList_GetItem(pieces, acquired);
        int failed;
        if (piece == NULL)
            goto done;
        Py_INCREF(piece);
        failed = PyObject_GetBuffer(piece, &held[acquired], PyBUF_SIMPLE) < 0;
        Py_DECREF(piece);
        if (failed)
            goto done;
        total += held[acquired].len;
    }
    if (total != out.len) {
        PyErr_Format(PyExc_ValueError, "pieces have %zd bytes, there is room for %zd", total, out.len);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    in_time = copy(held, count, out.buf, ends.buf, blocks, (Hash)(uintptr_t)hash, sums, in_place, until);
    Py_END_ALLOW_THREADS
    if (!in_time) {
        PyErr_SetString(PyExc_TimeoutError, "rows were not copied in time");
        goto done;
    }
    result = PyList_New(blocks);
    for (Py_ssize_t block = 0; result != NULL && block < blocks; block++) {
        PyObject *sum = PyLong_FromUnsignedLongLong(sums[block]);
        if (sum == NULL || PyList_SetItem(result, block, sum) < 0)
            Py_CLEAR(result);
    }
done:
    while (acquired > 0)
        PyBuffer_Release(&held[--acquired]);
    PyMem_Free(held);
    PyMem_Free(sums);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&out);
    return result;
}

static int store_integer(PyObject *value, char *at, size_t size, int is_signed)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    unsigned bits = 8 * size;

    if (overflow != 0)
        return 0; /* also what only uint64 holds: rare, and not worth a path of its own */
    if (is_signed ? bits < 64 && (number < -(1LL << (bits - 1)) || number >= 1LL << (bits - 1))
                  : number < 0 || (bits < 64 && number >= 1LL << bits))
        return 0;
    switch (size) {
    case 1: { int8_t narrow = (int8_t)number; memcpy(at, &narrow, size); break; }
    case 2: { int16_t narrow = (int16_t)number; memcpy(at, &narrow, size); break; }
    case 4: { int32_t narrow = (int32_t)number; memcpy(at, &narrow, size); break; }
    default: memcpy(at, &number, size);
    }
    return 1;
}

static int store_float(PyObject *value, char *at, size_t size)
{
    double number = PyFloat_AsDouble(value);

    if (size == sizeof number) {
        memcpy(at, &number, size);
        return 1;
    }
    float narrow = (float)number;
    if (narrow - narrow != 0 && number - number == 0) /* it became infinite */
        return 0;
    memcpy(at, &narrow, size);
    return 1;
}

/* Runs no code of anybody else's. */
static PyObject *numbers(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *values, *into;
    Py_buffer out;
    Py_ssize_t count, done = 0;
    size_t size;
    int kind;

    if (!PyArg_ParseTuple(arguments, "O!OC", &PyList_Type, &values, &into, &kind))
        return NULL;
    if (PyObject_GetBuffer(into, &out, PyBUF_WRITABLE) < 0)
        return NULL;
    count = PyList_Size(values);
    size = count > 0 && out.len % count == 0 ? out.len / count : 0;
    if ((kind == 'i' || kind == 'u') ? size == 1 || size == 2 || size == 4 || size == 8
                                     : kind == 'f' && (size == sizeof(float) || size == sizeof(double))) {
        PyTypeObject *type = kind == 'f' ? &PyFloat_Type : &PyLong_Type;
        char *at = out.buf;
        for (; done < count; done++, at += size) {
            PyObject *value = PyList_GetItem(values, done);
            if (Py_TYPE(value) != type)
                break;
            if (!(kind == 'f' ? store_float(value, at, size) : store_integer(value, at, size, kind == 'i')))
                break;
        }
    }
    PyBuffer_Release(&out);
    return PyBool_FromLong(done == count);
}

static int plain(PyObject *value, int levels)
{
    PyTypeObject *type = Py_TYPE(value);

    if (value == Py_None || type == &PyUnicode_Type || type == &PyLong_Type || type == &PyFloat_Type ||
        type == &PyBool_Type || type == &PyBytes_Type)
        return 1;
    if (levels == 0)
        return 0;
    if (type == &PyList_Type) {
        for (Py_ssize_t index = 0; index < PyList_Size(value); index++)
            if (!plain(PyList_GetItem(value, index), levels - 1))
                return 0;
        return 1;
    }
    if (type == &PyDict_Type) {
        PyObject *key, *item;
        Py_ssize_t position = 0;
        while (PyDict_Next(value, &position, &key, &item))
            if ((Py_TYPE(key) != &PyUnicode_Type && Py_TYPE(key) != &PyLong_Type) || !plain(item, levels - 1))
                return 0;
        return 1;
    }
    return 0;
}

/* Runs no code of anybody else's, so nothing changes under it. */
static PyObject *is_plain(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *values;
    int levels;

    if (!PyArg_ParseTuple(arguments, "O!i", &PyList_Type, &values, &levels))
        return NULL;
    return PyBool_FromLong(plain(values, levels + 1));
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS,
     "gather(pieces, into, ends, hash, in_place, until)\n--\n\n"
     "Copy a list of contiguous buffers, back to back, into one of exactly their length.\n\n"
     "Returns the digest of each block of it; they end at `ends` (int64) and are digested by the C function at the\n"
     "address `hash`, as uint64_t (const void *, size_t). What is `in_place` is not read soon. TimeoutError where a\n"
     "block would begin after time.monotonic() == until."},
    {"numbers", numbers, METH_VARARGS,
     "numbers(values, into, kind)\n--\n\n"
     "Store a list's numbers in a buffer of as many items: Python ints for kind 'i' and 'u', floats for 'f'.\n\n"
     "False, the buffer being written in part, where one of them has another type or does not fit."},
    {"is_plain", is_plain, METH_VARARGS,
     "is_plain(values, levels)\n--\n\nWhether a list's values are what msgpack has itself, at most so many levels deep."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
