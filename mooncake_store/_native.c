/* What takes Python too long for each of a batch's rows. All of it is optional: gather.py and tree.py do the same without.
 *
 * Only the stable interface of Python 3.11 is used: one build serves every later version. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <string.h>

/* Copies many pieces of memory into one, without the interpreter's lock, so that two threads can do it at once;
 * numpy.concatenate takes that lock again for each piece. */
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
     "gather(pieces, into)\n--\n\nCopy a list of contiguous buffers, back to back, into one of exactly their length."},
    {"is_plain", is_plain, METH_VARARGS,
     "is_plain(values, levels)\n--\n\nWhether a list's values are what msgpack has itself, at most so many levels deep."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
