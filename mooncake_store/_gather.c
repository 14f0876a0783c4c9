/* Copies many pieces of memory into one, without the interpreter's lock, so that two threads can do it at once.
 *
 * numpy.concatenate takes that lock again for each piece. Only the stable interface of Python 3.11 is used: one build
 * serves every later version. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *pieces, *into, *result = NULL;
    Py_buffer out, *held;
    Py_ssize_t count, acquired = 0, total = 0;

    if (!PyArg_ParseTuple(arguments, "O!O", &PyList_Type, &pieces, &into))
        return NULL;
    if (PyObject_GetBuffer(into, &out, PyBUF_WRITABLE) < 0)
        return NULL;
    count = PyList_Size(pieces);
    held = PyMem_Calloc(count ? count : 1, sizeof *held);
    if (held == NULL) {
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
    char *at = out.buf;
    for (Py_ssize_t index = 0; index < count; index++) {
        memcpy(at, held[index].buf, held[index].len);
        at += held[index].len;
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    while (acquired > 0)
        PyBuffer_Release(&held[--acquired]);
    PyMem_Free(held);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS,
     "gather(pieces, into)\n--\n\nCopy a list of contiguous buffers, back to back, into one of exactly their length."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_gather", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__gather(void)
{
    return PyModule_Create(&module);
}
