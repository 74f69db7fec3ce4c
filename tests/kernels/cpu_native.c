/* Runs every native kernel on buffers of exactly the size it may touch, for a sanitizer to watch,
 * and checks the results. Built and run by test_cpu_native.py. */

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

static const Kernels *kernels;
static _Thread_local unsigned state = 1;

static unsigned random_bits(void) {
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float *noise(int64_t n) {
    float *x = malloc(4 * (size_t)n + !n);
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(random_bits() % 512) / 256 - 1; /* fp16 holds it exactly */
    return x;
}

static float *blank(int64_t n) {
    float *x = malloc(4 * (size_t)n + !n);
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN;
    return x;
}

static void check(const char *what, const float *y, const double *expected, int64_t n) {
    double largest = 1e-30;
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(expected[i]));
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(y[i] - expected[i]) <= 1e-5 * largest)) {
            fprintf(stderr, "%s, %s: element %lld is %g, not %g\n", kernels->instruction_set, what,
                    (long long)i, y[i], expected[i]);
            exit(1);
        }
}

/* Parameters are float32, or bits of a small number in 16 bits. */
static void *parameters(Format format, int64_t n, double *values) {
    uint16_t *halves = malloc(2 * (size_t)n);
    float *floats = noise(n);
    for (int64_t i = 0; i < n; i++) {
        int exponent = (int)(random_bits() % 3), sign = (int)(random_bits() % 2);
        double value = ldexp(sign ? -1 : 1, -exponent);
        halves[i] = (uint16_t)(sign << 15 | (format == F16 ? (15 - exponent) << 10
                                                           : (127 - exponent) << 7));
        values[i] = format == F32 ? floats[i] : value;
    }
    free(format == F32 ? (void *)halves : (void *)floats);
    return format == F32 ? (void *)floats : (void *)halves;
}

static void products(Format format, Format parameter_format, int64_t rows, int64_t columns,
                     int64_t group, int64_t tokens) {
    int64_t n = rows * columns, n_groups = group ? n / group : 0;
    double *w = malloc(8 * (size_t)n), *scales = malloc(8 * (size_t)n_groups + 1);
    double *biases = malloc(8 * (size_t)n_groups + 1);
    Matrix m = {NULL, NULL, NULL, format, parameter_format, rows, columns, group};
    if (group) {
        static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        int bits = format == Q8 ? 8 : 4;
        uint8_t *codes = malloc((size_t)(n * bits / 8));
        for (int64_t i = 0; i < n * bits / 8; i++)
            codes[i] = (uint8_t)random_bits();
        m.data = codes;
        m.scales = parameters(parameter_format, n_groups, scales);
        m.biases = parameters(parameter_format, n_groups, biases);
        for (int64_t i = 0; i < n; i++) {
            int code = bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
            double number = format != E2M1 ? code : code & 8 ? -sizes[code & 7] : sizes[code];
            w[i] = scales[i / group] * number + biases[i / group];
        }
    } else {
        m.data = parameters(format, n, w);
    }
    float *x = noise(tokens * columns), *bias = noise(rows), *y = blank(tokens * rows);
    double *expected = malloc(8 * (size_t)(tokens * rows));
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            double sum = bias[r];
            for (int64_t c = 0; c < columns; c++)
                sum += w[r * columns + c] * x[t * columns + c];
            expected[t * rows + r] = sum;
        }
    pool_enter();
    kernels->linear(&(Linear){m, x, bias, tokens, y});
    check("linear", y, expected, tokens * rows);

    int64_t ids[] = {rows - 1, 0};
    float *embedded = blank(2 * columns);
    kernels->embed(&(Embed){m, ids, 2, embedded});
    pool_leave();
    check("embed", embedded, w + (rows - 1) * columns, columns);
    check("embed", embedded + columns, w, columns);
    free((void *)m.data), free((void *)m.scales), free((void *)m.biases);
    free(w), free(scales), free(biases), free(x), free(bias), free(y), free(expected);
    free(embedded);
}

static void elementwise(int64_t tokens, int64_t size) {
    float *x = noise(2 * tokens * size), *weight = noise(size), *y = blank(tokens * size);
    double *expected = malloc(8 * (size_t)(tokens * size));
    pool_enter();
    kernels->rms_norm(&(RMSNorm){x, weight, tokens, size, 1e-5f, y});
    for (int64_t t = 0; t < tokens; t++) {
        double squares = 0;
        for (int64_t i = 0; i < size; i++)
            squares += (double)x[t * size + i] * x[t * size + i];
        for (int64_t i = 0; i < size; i++)
            expected[t * size + i] =
                x[t * size + i] / sqrt(squares / (double)size + 1e-5) * weight[i];
    }
    check("rms_norm", y, expected, tokens * size);
    kernels->swiglu(&(SwiGLU){x, tokens, size, y});
    for (int64_t i = 0; i < tokens * size; i++) {
        double gate = x[i / size * 2 * size + i % size];
        expected[i] = gate / (1 + exp(-gate)) * x[i / size * 2 * size + size + i % size];
    }
    check("swiglu", y, expected, tokens * size);

    int64_t pairs = size / 3, n = 2 * tokens * size; /* the rest of the channels stays */
    float *table = blank(tokens * 2 * pairs), *turned = blank(n);
    double *quarter = malloc(8 * (size_t)n);
    for (int64_t i = 0; i < tokens * 2 * pairs; i++)
        table[i] = (float)(i / pairs % 2); /* cosines 0, sines 1 */
    for (int64_t i = 0; i < n; i++) {
        int64_t channel = i % size;
        quarter[i] = channel < pairs       ? -x[i + pairs]
                     : channel < 2 * pairs ? x[i - pairs]
                                           : x[i];
    }
    kernels->rope(&(RoPE){x, tokens * size, size, 2, tokens, size, pairs, table, turned});
    pool_leave();
    check("rope", turned, quarter, n);
    free(x), free(weight), free(y), free(expected), free(table), free(turned), free(quarter);
}

static Rows rows_of(const float *x, int64_t tokens, int64_t dim) {
    return (Rows){(const char *)x, 4 * tokens * dim, 4 * dim, F32};
}

/* A copy in fp16, which holds the values exactly. */
static uint16_t *written(const float *x, int64_t heads, int64_t tokens, int64_t dim) {
    uint16_t *halves = malloc(2 * (size_t)(heads * tokens * dim));
    kernels->write(&(Write){x, tokens * dim, dim, heads, tokens, dim, halves, tokens * dim, dim});
    return halves;
}

static void attend_both_ways(const Attention *a, const double *expected) {
    int64_t n = a->n_heads * a->tokens * a->head_dim;
    if (a->tokens <= 8) {
        kernels->attend_step(a);
        check("attend_step", a->out, expected, n);
    }
    kernels->attend_chunk(a);
    check("attend_chunk", a->out, expected, n);
}

static float *turns(int64_t n, int64_t step, int64_t pairs) {
    float *table = malloc(8 * (size_t)(n * pairs));
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < pairs; j++) {
            table[2 * i * pairs + j] = cosf((float)(i * step) / (float)(j + 1));
            table[(2 * i + 1) * pairs + j] = sinf((float)(i * step) / (float)(j + 1));
        }
    return table;
}

/* K of V, of `tokens` tokens from `position` on, as `turns` has the angles. */
static void make_keys(const Keys *keys, const float *v, int64_t position, int64_t tokens,
                      int64_t dim, float *k) {
    for (int64_t t = 0; t < tokens; t++, v += dim, k += dim) {
        for (int64_t c = 0; c < dim; c++)
            k[c] = v[c] * keys->weight[c];
        for (int64_t i = 0; i < keys->pairs; i++) {
            double angle = (double)(position + t) / (double)(i + 1), x = k[i], y = k[i + keys->half];
            k[i] = (float)(x * cos(angle) - y * sin(angle));
            k[i + keys->half] = (float)(y * cos(angle) + x * sin(angle));
        }
    }
}

/* Attention over tiles and new rows is that over what the tiles stand for and the new rows. pairs:
 * 0, or V is alone and so many pairs of its channels turn. */
static void attention(int64_t kv_heads, int64_t heads, int64_t dim, int64_t blocks, int64_t fresh,
                      int64_t tokens, float softcap, int64_t window, int bits, int64_t pairs) {
    int64_t past = blocks * BLOCK, length = past + fresh, parts = pairs ? 1 : 2;
    float *weight = noise(dim), *starts = turns(length / BLOCK + 1, BLOCK, pairs);
    float *places = turns(BLOCK, 1, pairs);
    Keys keys = {weight, starts, places, length / BLOCK + 1, pairs, pairs + 1};
    float *k = noise(kv_heads * past * dim), *v = noise(kv_heads * past * dim);
    float *new_k = noise(kv_heads * fresh * dim), *new_v = noise(kv_heads * fresh * dim);
    float *q = noise(heads * tokens * dim), *sinks = noise(heads);
    uint32_t *words = malloc(4 * (size_t)(kv_heads * blocks * parts * (bits + 1) * dim) + 1);
    float *out = blank(heads * tokens * dim);
    double *expected = calloc((size_t)(heads * tokens * dim), 8);
    double *weights = malloc(8 * (size_t)length);
    Seal seal = {rows_of(k, past, dim), rows_of(v, past, dim), kv_heads, blocks, dim, bits, words};
    Tiles tiles = {words, blocks * parts * (bits + 1) * dim, bits, pairs > 0};
    Attention a = {q, tokens * dim, dim, heads, kv_heads, tokens, dim, {{{0}, {0}, {0}, 0}}, 0,
                   0.3f, softcap, sinks, window, out, {0}};
    if (pairs) {
        a.keys = keys;
        seal.k.start = NULL;
        for (int64_t i = 0; i < kv_heads; i++)
            make_keys(&keys, new_v + i * fresh * dim, past, fresh, dim, new_k + i * fresh * dim);
    }
    if (blocks)
        a.spans[a.n_spans++] = (Span){tiles, {0}, {0}, past};
    a.spans[a.n_spans++] =
        (Span){{0}, rows_of(pairs ? NULL : new_k, fresh, dim), rows_of(new_v, fresh, dim), fresh};

    pool_enter();
    kernels->seal(&seal);
    kernels->unseal(&(Unseal){tiles, kv_heads, blocks, dim, pairs ? NULL : k, v});
    if (pairs)
        for (int64_t i = 0; i < kv_heads; i++)
            make_keys(&keys, v + i * past * dim, 0, past, dim, k + i * past * dim);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < tokens; t++) {
            int64_t kv = h / (heads / kv_heads), position = length - tokens + t;
            double sum = exp(sinks[h]);
            for (int64_t i = 0; i < length; i++) {
                const float *key = i < past ? k + (kv * past + i) * dim
                                            : new_k + (kv * fresh + i - past) * dim;
                double score = 0;
                for (int64_t c = 0; c < dim; c++)
                    score += (double)q[(h * tokens + t) * dim + c] * key[c];
                score *= a.scale;
                if (softcap > 0)
                    score = softcap * tanh(score / softcap);
                int seen = i <= position && (!window || i > position - window);
                sum += weights[i] = seen ? exp(score) : 0;
            }
            for (int64_t i = 0; i < length; i++)
                for (int64_t c = 0; c < dim; c++)
                    expected[(t * heads + h) * dim + c] +=
                        weights[i] / sum *
                        (i < past ? v[(kv * past + i) * dim + c]
                                  : new_v[(kv * fresh + i - past) * dim + c]);
        }
    attend_both_ways(&a, expected);
    uint16_t *half_k = written(new_k, kv_heads, fresh, dim);
    uint16_t *half_v = written(new_v, kv_heads, fresh, dim);
    if (!pairs)
        a.spans[a.n_spans - 1].k = (Rows){(const char *)half_k, 2 * fresh * dim, 2 * dim, F16};
    a.spans[a.n_spans - 1].v = (Rows){(const char *)half_v, 2 * fresh * dim, 2 * dim, F16};
    attend_both_ways(&a, expected);
    pool_leave();
    free(half_k), free(half_v), free(weight), free(starts), free(places);
    free(k), free(v), free(new_k), free(new_v), free(q), free(sinks), free(words), free(out);
    free(expected), free(weights);
}

static void everything(void) {
    static const Format formats[] = {F32, F16, BF16};
    for (int i = 0; i < 3; i++)
        for (int64_t tokens = 1; tokens < 30; tokens += 13) {
            products(formats[i], F32, 37, 45, 0, tokens);
            for (int64_t group = 32; group <= 128; group *= 2) {
                products(Q4, formats[i], 37, 3 * group, group, tokens);
                products(E2M1, formats[i], 37, 3 * group, group, tokens);
                products(Q8, formats[i], 37, 3 * group, group, tokens);
            }
        }
    products(Q4, F16, 1, 32, 32, 1);
    products(Q4, F16, 130, 640, 32, 7);
    products(E2M1, BF16, 130, 640, 32, 7);
    products(Q8, F16, 67, 576, 64, 5);
    elementwise(1, 1);
    elementwise(5, 67);
    elementwise(300, 96);
    attention(1, 1, 32, 0, 1, 1, 0, 0, 4, 0);
    attention(2, 6, 64, 7, 70, 3, 0, 0, 4, 0);
    attention(2, 6, 64, 7, 70, 3, 0, 0, 3, 0);
    attention(2, 6, 64, 7, 70, 8, 5, 60, 4, 0);
    attention(1, 5, 96, 9, 41, 41, 0, 0, 3, 0);
    attention(2, 2, 288, 3, 150, 150, 9, 100, 4, 0);
    attention(2, 6, 64, 7, 70, 8, 5, 0, 4, 31);
    attention(1, 5, 96, 9, 41, 41, 0, 0, 3, 17);
}

/* Two callers at once share the pool one after the other. */
static void *call_often(void *nothing) {
    for (int i = 0; i < 20; i++)
        elementwise(300, 96);
    return nothing;
}

/* Arguments: how many threads, for one round each. */
int main(int n_arguments, char **arguments) {
    const Kernels *all[] = {kernels_base, NULL, NULL};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        all[1] = kernels_avx2;
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        all[2] = kernels_avx512;
#endif
    for (int i = 0; i < 3; i++)
        for (int j = 1; all[i] && j < n_arguments; j++) {
            kernels = all[i];
            pool_resize(atoi(arguments[j]));
            everything();
            printf("%s, %s threads: right\n", kernels->instruction_set, arguments[j]);
        }
    pthread_t other;
    pthread_create(&other, NULL, call_often, NULL);
    call_often(NULL);
    pthread_join(other, NULL);
    pool_resize(1);
    return 0;
}
