/* The kernels as Python functions on numpy arrays; kernels/cpu/_native.pyi says what each takes.
 *
 * A call that takes less than a fraction of a millisecond keeps the interpreter lock: giving it up
 * lets a busy UI thread have it for five milliseconds, and a token is hundreds of calls. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "kernels.h"
#include "pool.h"

enum { MAX_STEP_TOKENS = 8, LONG_WORK = 4000000 };

static const Kernels *kernels;

/* References that one call holds, and the interpreter while it is let go. */
typedef struct {
    PyObject *objects[32];
    int n;
    PyThreadState *interpreter;
} Held;

static void *hold(Held *held, void *object) {
    if (object)
        held->objects[held->n++] = object;
    return object;
}

/* Drops what was held; passes the result on. */
static PyObject *release(Held *held, PyObject *result) {
    while (held->n)
        Py_DECREF(held->objects[--held->n]);
    return result;
}

static void *wrong(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return NULL;
}

/* Runs kernels->call on `job` with `work` multiplications ahead; 0 with MemoryError set if memory
 * ran out. */
#define RUN(call, work) (begin(&held, work), end(&held, kernels->call(&job)))

static void begin(Held *held, int64_t work) {
    held->interpreter = work > LONG_WORK ? PyEval_SaveThread() : NULL;
    pool_enter();
}

static int end(Held *held, int done) {
    pool_leave();
    if (held->interpreter)
        PyEval_RestoreThread(held->interpreter);
    if (!done)
        PyErr_NoMemory();
    return done;
}

/* An aligned float32 array of `ndim` axes (0: any); its last axis is contiguous, all are if
 * `contiguous`. A copy where the object is something else. */
static PyArrayObject *floats(Held *held, PyObject *object, int ndim, int contiguous) {
    int flags = NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_FORCECAST;
    if (contiguous)
        flags |= NPY_ARRAY_C_CONTIGUOUS;
    PyArrayObject *array =
        hold(held, PyArray_FROMANY(object, NPY_FLOAT32, ndim, ndim, flags));
    if (!array)
        return NULL;
    int n = PyArray_NDIM(array);
    if (n == 0)
        return wrong("an array of at least one axis is needed");
    if (PyArray_STRIDE(array, n - 1) != 4)
        array = hold(held, PyArray_FROMANY((PyObject *)array, NPY_FLOAT32, n, n,
                                           flags | NPY_ARRAY_C_CONTIGUOUS));
    return array;
}

static PyArrayObject *output(Held *held, int n, const npy_intp *shape) {
    return hold(held, PyArray_SimpleNew(n, (npy_intp *)shape, NPY_FLOAT32));
}

/* Names that attributes are read by. */
static PyObject *s_data, *s_scales, *s_biases, *s_group_size, *s_bits, *s_mode;
static PyObject *s_sink_k, *s_sink_v, *s_tiles, *s_tail_k, *s_tail_v;
static PyObject *s_n_sink, *s_n_blocks, *s_n_tail;

static PyArrayObject *array_attribute(Held *held, PyObject *object, PyObject *name) {
    PyObject *value = hold(held, PyObject_GetAttr(object, name));
    if (value && !PyArray_Check(value))
        return wrong("a numpy array is needed");
    return (PyArrayObject *)value;
}

/* -1 with an exception set if there is none. */
static int64_t integer_attribute(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value)
        return -1;
    long long number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    if (number < 0 && !PyErr_Occurred())
        wrong("a count is negative");
    return number;
}

/* F32, F16 or BF16 (as uint16), or -1 with an exception set. */
static int float_format(PyArrayObject *array) {
    switch (PyArray_TYPE(array)) {
    case NPY_FLOAT32: return F32;
    case NPY_FLOAT16: return F16;
    case NPY_UINT16: return BF16;
    default: wrong("a matrix is float32, float16, or bfloat16 as uint16"); return -1;
    }
}

static int is_table(PyArrayObject *array) {
    return PyArray_NDIM(array) == 2 && PyArray_ISCARRAY_RO(array);
}

static int read_matrix(Held *held, PyObject *weight, Matrix *m) {
    PyArrayObject *data = array_attribute(held, weight, s_data);
    if (!data)
        return 0;
    int64_t bits = integer_attribute(weight, s_bits);
    if (bits < 0)
        return 0;
    if (!is_table(data))
        return !!wrong("a matrix must have two axes and be contiguous and aligned");
    *m = (Matrix){PyArray_DATA(data), NULL, NULL, F32, F32, PyArray_DIM(data, 0),
                  PyArray_DIM(data, 1), 0};
    if (!bits) {
        int format = float_format(data);
        m->format = (Format)format;
        return format >= 0;
    }
    if ((bits != 4 && bits != 8) || PyArray_TYPE(data) != NPY_UINT32)
        return !!wrong("a quantised matrix has 4 or 8 bits in words of uint32");
    PyArrayObject *scales = array_attribute(held, weight, s_scales);
    PyArrayObject *biases = scales ? array_attribute(held, weight, s_biases) : NULL;
    if (!biases)
        return 0;
    int format = float_format(scales);
    m->group_size = integer_attribute(weight, s_group_size);
    if (format < 0 || m->group_size < 0)
        return 0;
    PyObject *mode = hold(held, PyObject_GetAttr(weight, s_mode));
    if (!mode)
        return 0;
    int floats = PyUnicode_Check(mode) && !PyUnicode_CompareWithASCIIString(mode, "mxfp4");
    m->format = bits == 8 ? Q8 : floats ? E2M1 : Q4;
    m->parameters = (Format)format;
    m->columns *= 32 / bits;
    m->scales = PyArray_DATA(scales);
    m->biases = PyArray_DATA(biases);
    int64_t group = m->group_size;
    if ((group != 32 && group != 64 && group != 128) || m->columns % group)
        return !!wrong("groups must be 32, 64 or 128 columns and make up a row");
    if (!is_table(scales) || !is_table(biases) || PyArray_TYPE(biases) != PyArray_TYPE(scales) ||
        PyArray_DIM(scales, 0) != m->rows || PyArray_DIM(scales, 1) != m->columns / group ||
        !PyArray_SAMESHAPE(scales, biases))
        return !!wrong("scales and biases must be one per group, contiguous and of one type");
    return 1;
}

static PyObject *py_linear(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    Linear job = {.bias = NULL};
    if (n != 3)
        return wrong("linear takes x, weight, bias");
    PyArrayObject *x = floats(&held, args[0], 2, 1), *bias, *y;
    if (!x || !read_matrix(&held, args[1], &job.matrix))
        return release(&held, NULL);
    if (PyArray_DIM(x, 1) != job.matrix.columns)
        return release(&held, wrong("x has another width than the matrix"));
    if (args[2] != Py_None) {
        if (!(bias = floats(&held, args[2], 1, 1)))
            return release(&held, NULL);
        if (PyArray_DIM(bias, 0) != job.matrix.rows)
            return release(&held, wrong("the bias has another length than the matrix has rows"));
        job.bias = PyArray_DATA(bias);
    }
    job.tokens = PyArray_DIM(x, 0);
    if (!(y = output(&held, 2, (npy_intp[]){job.tokens, job.matrix.rows})))
        return release(&held, NULL);
    job.x = PyArray_DATA(x);
    job.y = PyArray_DATA(y);
    if (job.tokens && !RUN(linear, job.tokens * job.matrix.rows * job.matrix.columns))
        return release(&held, NULL);
    Py_INCREF(y);
    return release(&held, (PyObject *)y);
}

static PyObject *py_embed(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    Embed job;
    if (n != 2)
        return wrong("embed takes weight, ids");
    if (!read_matrix(&held, args[0], &job.matrix))
        return release(&held, NULL);
    PyArrayObject *y, *ids = hold(&held, PyArray_FROMANY(args[1], NPY_INT64, 1, 1,
                                                         NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    if (!ids)
        return release(&held, NULL);
    job.ids = PyArray_DATA(ids);
    job.tokens = PyArray_DIM(ids, 0);
    for (int64_t i = 0; i < job.tokens; i++)
        if (job.ids[i] < 0 || job.ids[i] >= job.matrix.rows)
            return release(&held, wrong("a token id is outside of the vocabulary"));
    if (!(y = output(&held, 2, (npy_intp[]){job.tokens, job.matrix.columns})))
        return release(&held, NULL);
    job.y = PyArray_DATA(y);
    if (!RUN(embed, job.tokens * job.matrix.columns))
        return release(&held, NULL);
    Py_INCREF(y);
    return release(&held, (PyObject *)y);
}

static PyObject *py_rms_norm(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    RMSNorm job;
    if (n != 3)
        return wrong("rms_norm takes x, weight, eps");
    PyArrayObject *x = floats(&held, args[0], 0, 1), *weight = floats(&held, args[1], 1, 1), *y;
    if (!x || !weight)
        return release(&held, NULL);
    job.eps = (float)PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred())
        return release(&held, NULL);
    job.size = PyArray_DIM(weight, 0);
    if (PyArray_DIM(x, PyArray_NDIM(x) - 1) != job.size)
        return release(&held, wrong("x has another width than the norm's weight"));
    if (!(y = output(&held, PyArray_NDIM(x), PyArray_SHAPE(x))))
        return release(&held, NULL);
    job.tokens = job.size ? PyArray_SIZE(x) / job.size : 0;
    job.x = PyArray_DATA(x);
    job.weight = PyArray_DATA(weight);
    job.y = PyArray_DATA(y);
    if (!RUN(rms_norm, job.tokens * job.size))
        return release(&held, NULL);
    Py_INCREF(y);
    return release(&held, (PyObject *)y);
}

static PyObject *py_swiglu(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    SwiGLU job;
    if (n != 1)
        return wrong("swiglu takes gate_up");
    PyArrayObject *x = floats(&held, args[0], 2, 1), *y;
    if (!x)
        return release(&held, NULL);
    if (PyArray_DIM(x, 1) % 2)
        return release(&held, wrong("gate and up must be equally wide"));
    job.tokens = PyArray_DIM(x, 0);
    job.size = PyArray_DIM(x, 1) / 2;
    if (!(y = output(&held, 2, (npy_intp[]){job.tokens, job.size})))
        return release(&held, NULL);
    job.x = PyArray_DATA(x);
    job.y = PyArray_DATA(y);
    if (!RUN(swiglu, 8 * job.tokens * job.size))
        return release(&held, NULL);
    Py_INCREF(y);
    return release(&held, (PyObject *)y);
}

static PyObject *py_rope(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    RoPE job;
    if (n != 2)
        return wrong("rope takes x, table");
    PyArrayObject *x = floats(&held, args[0], 3, 0), *table = floats(&held, args[1], 3, 1), *y;
    if (!x || !table)
        return release(&held, NULL);
    job.heads = PyArray_DIM(x, 0);
    job.tokens = PyArray_DIM(x, 1);
    job.head_dim = PyArray_DIM(x, 2);
    job.pairs = PyArray_DIM(table, 2);
    if (PyArray_DIM(table, 0) != job.tokens || PyArray_DIM(table, 1) != 2 ||
        2 * job.pairs > job.head_dim)
        return release(&held, wrong("the rotary table does not fit x"));
    if (!(y = output(&held, 3, PyArray_SHAPE(x))))
        return release(&held, NULL);
    job.head_stride = PyArray_STRIDE(x, 0) / 4;
    job.token_stride = PyArray_STRIDE(x, 1) / 4;
    job.x = PyArray_DATA(x);
    job.table = PyArray_DATA(table);
    job.y = PyArray_DATA(y);
    if (!RUN(rope, job.heads * job.tokens * job.head_dim))
        return release(&held, NULL);
    Py_INCREF(y);
    return release(&held, (PyObject *)y);
}

/* K or V, (heads, tokens, head_dim), float16 or float32; a copy where rows are not contiguous. */
static int read_rows(Held *held, PyObject *object, Rows *rows, npy_intp shape[3]) {
    if (!object || !PyArray_Check(object))
        return object ? !!wrong("a numpy array is needed") : 0;
    PyArrayObject *array = (PyArrayObject *)object;
    int type = PyArray_TYPE(array);
    if ((type != NPY_FLOAT16 && type != NPY_FLOAT32) || PyArray_NDIM(array) != 3)
        return !!wrong("K and V are float16 or float32 of three axes");
    if (!PyArray_ISALIGNED(array) || PyArray_ISBYTESWAPPED(array) ||
        PyArray_STRIDE(array, 2) != PyArray_ITEMSIZE(array))
        array = hold(held, PyArray_FROMANY(object, type, 3, 3, NPY_ARRAY_CARRAY_RO));
    if (!array)
        return 0;
    memcpy(shape, PyArray_SHAPE(array), 3 * sizeof *shape);
    *rows = (Rows){PyArray_DATA(array), PyArray_STRIDE(array, 0), PyArray_STRIDE(array, 1),
                   type == NPY_FLOAT16 ? F16 : F32};
    return 1;
}

/* K of V's shape, or none where the object is None. */
static int read_keys(Held *held, PyObject *object, Rows *rows, npy_intp shape[3],
                     const npy_intp v_shape[3]) {
    if (object != Py_None)
        return read_rows(held, object, rows, shape);
    *rows = (Rows){0};
    memcpy(shape, v_shape, 3 * sizeof *shape);
    return 1;
}

static int read_tiles(PyObject *object, Tiles *tiles, npy_intp shape[3]) {
    if (!object || !PyArray_Check(object))
        return object ? !!wrong("a numpy array is needed") : 0;
    PyArrayObject *array = (PyArrayObject *)object;
    if (PyArray_TYPE(array) != NPY_UINT32 || PyArray_NDIM(array) != 3)
        return !!wrong("tiles are uint32 of three axes");
    memcpy(shape, PyArray_SHAPE(array), 3 * sizeof *shape);
    int64_t words = shape[2];
    if (!PyArray_ISALIGNED(array) || PyArray_ISBYTESWAPPED(array) ||
        (PyArray_SIZE(array) && shape[2] > 1 && PyArray_STRIDE(array, 2) != 4) ||
        (PyArray_SIZE(array) && shape[1] > 1 && PyArray_STRIDE(array, 1) != 4 * words))
        return !!wrong("the tiles of a head must be contiguous");
    *tiles = (Tiles){PyArray_DATA(array), PyArray_STRIDE(array, 0) / 4, 0, 0};
    return 1;
}

static int is_head_dim(int64_t dim) { return dim > 0 && dim <= MAX_HEAD_DIM && dim % GROUP == 0; }

static PyObject *py_write(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    Write job;
    if (n != 3)
        return wrong("write takes buffer, start, x");
    PyArrayObject *buffer = (PyArrayObject *)args[0], *x = floats(&held, args[2], 3, 0);
    int64_t start = PyLong_AsLongLong(args[1]);
    if (!x || PyErr_Occurred())
        return release(&held, NULL);
    if (!PyArray_Check(buffer) || PyArray_NDIM(buffer) != 3 ||
        PyArray_TYPE(buffer) != NPY_FLOAT16 || !PyArray_ISBEHAVED(buffer) ||
        PyArray_STRIDE(buffer, 2) != 2)
        return release(&held, wrong("the buffer must be float16, (heads, tokens, head_dim)"));
    job.heads = PyArray_DIM(x, 0);
    job.tokens = PyArray_DIM(x, 1);
    job.head_dim = PyArray_DIM(x, 2);
    if (PyArray_DIM(buffer, 0) != job.heads || PyArray_DIM(buffer, 2) != job.head_dim ||
        !is_head_dim(job.head_dim) || start < 0 || start + job.tokens > PyArray_DIM(buffer, 1))
        return release(&held, wrong("what is written does not fit the buffer"));
    job.x = PyArray_DATA(x);
    job.head_stride = PyArray_STRIDE(x, 0) / 4;
    job.token_stride = PyArray_STRIDE(x, 1) / 4;
    job.to_head_stride = PyArray_STRIDE(buffer, 0) / 2;
    job.to_token_stride = PyArray_STRIDE(buffer, 1) / 2;
    job.to = (uint16_t *)PyArray_DATA(buffer) + start * job.to_token_stride;
    if (!RUN(write, job.heads * job.tokens * job.head_dim))
        return release(&held, NULL);
    Py_INCREF(Py_None);
    return release(&held, Py_None);
}

/* 0 with an exception set where there is no such codec. */
static int code_bits(PyObject *object) {
    long bits = PyLong_AsLong(object);
    if (bits != 3 && bits != 4 && !PyErr_Occurred())
        wrong("codes have 3 or 4 bits");
    return PyErr_Occurred() ? 0 : (int)bits;
}

static PyObject *py_seal(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    Seal job;
    npy_intp shape[3], v_shape[3];
    PyArrayObject *tiles;
    if (n != 3)
        return wrong("seal takes k, v, bits");
    if (!(job.bits = code_bits(args[2])))
        return NULL;
    if (!read_rows(&held, args[1], &job.v, shape) ||
        !read_keys(&held, args[0], &job.k, v_shape, shape))
        return release(&held, NULL);
    if (memcmp(shape, v_shape, sizeof shape) || shape[1] % BLOCK || !is_head_dim(shape[2]))
        return release(&held, wrong("k and v must be whole blocks of one shape"));
    job.heads = shape[0];
    job.blocks = shape[1] / BLOCK;
    job.head_dim = shape[2];
    npy_intp words = (job.k.start ? 2 : 1) * (job.bits + 1) * job.head_dim;
    npy_intp tiles_shape[] = {job.heads, job.blocks, words};
    if (!(tiles = hold(&held, PyArray_SimpleNew(3, tiles_shape, NPY_UINT32))))
        return release(&held, NULL);
    job.tiles = PyArray_DATA(tiles);
    if (!RUN(seal, 8 * shape[0] * shape[1] * shape[2]))
        return release(&held, NULL);
    Py_INCREF(tiles);
    return release(&held, (PyObject *)tiles);
}

static PyObject *unsealed(PyObject *const *args, Py_ssize_t n, int k_is_v) {
    Held held = {.n = 0};
    Unseal job = {.k = NULL};
    npy_intp shape[3];
    if (n != 2)
        return wrong("unseal takes tiles, bits");
    if (!read_tiles(args[0], &job.tiles, shape) || !(job.tiles.bits = code_bits(args[1])))
        return NULL;
    int64_t per_channel = (k_is_v ? 1 : 2) * (job.tiles.bits + 1);
    if (shape[2] % per_channel || !is_head_dim(shape[2] / per_channel))
        return wrong("tiles are 8 words wide per channel of a head with 3 bits, 10 with 4, and half "
                     "of that where V is alone");
    job.tiles.k_is_v = k_is_v;
    job.heads = shape[0];
    job.blocks = shape[1];
    job.head_dim = shape[2] / per_channel;
    npy_intp rows_shape[] = {job.heads, job.blocks * BLOCK, job.head_dim};
    PyArrayObject *v = output(&held, 3, rows_shape), *k = k_is_v ? v : output(&held, 3, rows_shape);
    if (!k || !v)
        return release(&held, NULL);
    job.v = PyArray_DATA(v);
    if (!k_is_v)
        job.k = PyArray_DATA(k);
    if (!RUN(unseal, 8 * shape[0] * shape[1] * shape[2]))
        return release(&held, NULL);
    if (!k_is_v)
        return release(&held, PyTuple_Pack(2, k, v));
    Py_INCREF(v);
    return release(&held, (PyObject *)v);
}

static PyObject *py_unseal(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    return unsealed(args, n, 0);
}

static PyObject *py_unseal_values(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    return unsealed(args, n, 1);
}

static int read_span(Held *held, PyObject *k, PyObject *v, int64_t tokens, Attention *a) {
    npy_intp shape[3], v_shape[3];
    Span span = {{0}, {0}, {0}, tokens};
    if (!read_rows(held, v, &span.v, v_shape) || !read_keys(held, k, &span.k, shape, v_shape))
        return 0;
    if (memcmp(shape, v_shape, sizeof shape) || shape[0] != a->n_kv_heads ||
        shape[2] != a->head_dim || tokens > shape[1])
        return !!wrong("K and V of one layer do not fit each other or the query");
    if (tokens)
        a->spans[a->n_spans++] = span;
    return 1;
}

static int read_view(Held *held, PyObject *view, Attention *a) {
    int64_t n_sink = integer_attribute(view, s_n_sink);
    int64_t n_blocks = n_sink < 0 ? -1 : integer_attribute(view, s_n_blocks);
    int64_t n_tail = n_blocks < 0 ? -1 : integer_attribute(view, s_n_tail);
    PyObject *tiles = n_tail < 0 ? NULL : hold(held, PyObject_GetAttr(view, s_tiles));
    Span span = {{0}, {0}, {0}, n_blocks * BLOCK};
    npy_intp shape[3];
    if (!read_tiles(tiles, &span.tiles, shape))
        return 0;
    int k_is_v = a->keys.weight != NULL, parts = k_is_v ? 1 : 2;
    a->n_kv_heads = shape[0];
    span.tiles.bits = shape[2] == 4 * parts * a->head_dim ? 3 : 4;
    span.tiles.k_is_v = k_is_v;
    if (shape[2] != parts * (span.tiles.bits + 1) * a->head_dim || n_blocks > shape[1])
        return !!wrong("the tiles do not fit the query");
    PyObject *sink_k = k_is_v ? Py_None : (PyObject *)array_attribute(held, view, s_sink_k);
    PyObject *sink_v = sink_k ? (PyObject *)array_attribute(held, view, s_sink_v) : NULL;
    PyObject *tail_k = k_is_v ? Py_None : (PyObject *)array_attribute(held, view, s_tail_k);
    PyObject *tail_v = tail_k ? (PyObject *)array_attribute(held, view, s_tail_v) : NULL;
    if (!sink_v || !tail_v || !read_span(held, sink_k, sink_v, n_sink, a))
        return 0;
    if (n_blocks)
        a->spans[a->n_spans++] = span;
    if (!read_span(held, tail_k, tail_v, n_tail, a))
        return 0;
    int64_t length = n_sink + n_blocks * BLOCK + n_tail;
    if (k_is_v && (length + 2 * BLOCK - 2) / BLOCK > a->keys.blocks)
        return !!wrong("the keys' starts do not cover what is held");
    return 1;
}

/* weight, starts, places, half: what `keys` points at. */
static int read_rule(Held *held, PyObject *tuple, Attention *a) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != 4)
        return !!wrong("the keys' rule is weight, starts, places, half");
    PyArrayObject *weight = floats(held, PyTuple_GET_ITEM(tuple, 0), 1, 1);
    PyArrayObject *starts = weight ? floats(held, PyTuple_GET_ITEM(tuple, 1), 3, 1) : NULL;
    PyArrayObject *places = starts ? floats(held, PyTuple_GET_ITEM(tuple, 2), 3, 1) : NULL;
    int64_t half = places ? PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, 3)) : -1;
    if (!places || PyErr_Occurred())
        return 0;
    npy_intp pairs = PyArray_DIM(places, 2);
    if (PyArray_DIM(weight, 0) != a->head_dim || PyArray_DIM(places, 0) != BLOCK ||
        PyArray_DIM(places, 1) != 2 || PyArray_DIM(starts, 1) != 2 ||
        PyArray_DIM(starts, 2) != pairs || pairs > half || 2 * half > a->head_dim)
        return !!wrong("the keys' rule does not fit the query");
    a->keys = (Keys){PyArray_DATA(weight), PyArray_DATA(starts), PyArray_DATA(places),
                     PyArray_DIM(starts, 0), pairs, half};
    return 1;
}

static PyObject *py_attend(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Held held = {.n = 0};
    Attention job = {.n_spans = 0};
    if (n != 9)
        return wrong("attend takes q, view, k, v, scale, softcap, sinks, window, keys");
    PyArrayObject *q = floats(&held, args[0], 3, 0), *sinks, *out;
    if (!q)
        return release(&held, NULL);
    job.n_heads = PyArray_DIM(q, 0);
    job.tokens = PyArray_DIM(q, 1);
    job.head_dim = PyArray_DIM(q, 2);
    job.head_stride = PyArray_STRIDE(q, 0) / 4;
    job.token_stride = PyArray_STRIDE(q, 1) / 4;
    job.q = PyArray_DATA(q);
    if (!is_head_dim(job.head_dim))
        return release(&held, wrong("head_dim must be a multiple of 32, at most 512"));
    if (args[8] != Py_None && !read_rule(&held, args[8], &job))
        return release(&held, NULL);
    if (args[1] != Py_None && !read_view(&held, args[1], &job))
        return release(&held, NULL);
    if (args[2] != Py_None) {
        if (!PyArray_Check(args[2]) || PyArray_NDIM((PyArrayObject *)args[2]) != 3)
            return release(&held, wrong("K and V are arrays of three axes"));
        PyArrayObject *k = (PyArrayObject *)args[2];
        if (args[1] == Py_None)
            job.n_kv_heads = PyArray_DIM(k, 0);
        if (!read_span(&held, args[2], args[3], PyArray_DIM(k, 1), &job))
            return release(&held, NULL);
    }
    if (job.n_kv_heads < 1 || job.n_heads % job.n_kv_heads)
        return release(&held, wrong("query heads must share KV heads evenly"));
    job.scale = (float)PyFloat_AsDouble(args[4]);
    job.softcap = args[5] == Py_None ? 0 : (float)PyFloat_AsDouble(args[5]);
    job.window = args[7] == Py_None ? 0 : PyLong_AsLongLong(args[7]);
    if (PyErr_Occurred())
        return release(&held, NULL);
    if (args[6] != Py_None) {
        if (!(sinks = floats(&held, args[6], 1, 1)))
            return release(&held, NULL);
        if (PyArray_DIM(sinks, 0) != job.n_heads)
            return release(&held, wrong("there must be one sink logit per query head"));
        job.sinks = PyArray_DATA(sinks);
    }
    int64_t length = 0;
    for (int i = 0; i < job.n_spans; i++)
        length += job.spans[i].tokens;
    if (job.tokens > length || job.window < 0 || (args[7] != Py_None && !job.window))
        return release(&held, wrong("every query token must see at least itself"));
    if (!(out = output(&held, 3, (npy_intp[]){job.tokens, job.n_heads, job.head_dim})))
        return release(&held, NULL);
    job.out = PyArray_DATA(out);
    int64_t work = 2 * job.n_heads * job.tokens * length * job.head_dim;
    if (job.tokens &&
        !(job.tokens <= MAX_STEP_TOKENS ? RUN(attend_step, work) : RUN(attend_chunk, work)))
        return release(&held, NULL);
    return release(&held, PyArray_SwapAxes(out, 0, 1));
}

static PyObject *py_set_threads(PyObject *self, PyObject *number) {
    (void)self;
    long n = PyLong_AsLong(number);
    if (n < 1)
        return PyErr_Occurred() ? NULL : wrong("at least one thread is needed");
    pool_resize(n > INT_MAX ? INT_MAX : (int)n);
    return PyLong_FromLong(pool_size());
}

static PyObject *py_trim_heap(PyObject *self, PyObject *none) {
    (void)self, (void)none;
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
    Py_RETURN_NONE;
}

static const Kernels *const *const all[] = {&kernels_avx512, &kernels_avx2, &kernels_base};

static int machine_has(const Kernels *k) {
    if (!k)
        return 0;
#if defined(__x86_64__)
    if (k == kernels_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (k == kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return 1;
}

static PyObject *py_instruction_sets(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < 3; i++)
        if (machine_has(*all[i])) {
            PyObject *name = PyUnicode_FromString((*all[i])->instruction_set);
            if (!name || PyList_Append(names, name))
                Py_CLEAR(names);
            Py_XDECREF(name);
        }
    return names;
}

static PyObject *py_use(PyObject *self, PyObject *name) {
    (void)self;
    for (int i = 0; i < 3; i++)
        if (machine_has(*all[i]) && PyUnicode_Check(name) &&
            !PyUnicode_CompareWithASCIIString(name, (*all[i])->instruction_set)) {
            kernels = *all[i];
            Py_RETURN_NONE;
        }
    return wrong("this machine has no such instruction set");
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(linear), FAST(embed), FAST(rms_norm), FAST(swiglu), FAST(rope), FAST(write), FAST(seal),
    FAST(unseal), FAST(unseal_values), FAST(attend),
    {"set_threads", py_set_threads, METH_O, NULL},
    {"trim_heap", py_trim_heap, METH_NOARGS, NULL},
    {"instruction_sets", py_instruction_sets, METH_NOARGS, NULL},
    {"use", py_use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    import_array();
    struct {
        PyObject **variable;
        const char *name;
    } names[] = {
        {&s_data, "data"}, {&s_scales, "scales"}, {&s_biases, "biases"},
        {&s_group_size, "group_size"}, {&s_bits, "bits"}, {&s_mode, "mode"}, {&s_sink_k, "sink_k"},
        {&s_sink_v, "sink_v"}, {&s_tiles, "tiles"}, {&s_tail_k, "tail_k"},
        {&s_tail_v, "tail_v"}, {&s_n_sink, "n_sink"}, {&s_n_blocks, "n_blocks"},
        {&s_n_tail, "n_tail"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].variable = PyUnicode_InternFromString(names[i].name)))
            return NULL;
    for (int i = 0; !kernels; i++)
        if (machine_has(*all[i]))
            kernels = *all[i];
    return PyModule_Create(&definition);
}
