/* What the kernels compute, the same for every instruction set. Sizes and strides count elements
 * unless they say bytes; buffers are aligned to their element. A call returns 0 if memory ran out.
 * See kernels/backend.py for the meaning of each computation. */

#ifndef TQCHAT_KERNELS_H
#define TQCHAT_KERNELS_H

#include <stdint.h>

enum { BLOCK = 32, GROUP = 32, MAX_HEAD_DIM = 512 };

/* E2M1: 4 bits that are a small float each, where Q4's are an integer. */
typedef enum { F32, F16, BF16, Q4, E2M1, Q8 } Format;

/* kernels/weight.py's Weight. `parameters` is the format of scales and biases. */
typedef struct {
    const void *data, *scales, *biases;
    Format format, parameters;
    int64_t rows, columns, group_size;
} Matrix;

typedef struct {
    Matrix matrix;
    const float *x; /* (tokens, columns) */
    const float *bias; /* (rows,) or NULL */
    int64_t tokens;
    float *y; /* (tokens, rows) */
} Linear;

typedef struct {
    Matrix matrix;
    const int64_t *ids; /* (tokens,), in range */
    int64_t tokens;
    float *y; /* (tokens, columns) */
} Embed;

typedef struct {
    const float *x, *weight; /* (tokens, size), (size,) */
    int64_t tokens, size;
    float eps;
    float *y;
} RMSNorm;

typedef struct {
    const float *x; /* (tokens, 2 size), gate then up */
    int64_t tokens, size;
    float *y;
} SwiGLU;

typedef struct {
    const float *x; /* (heads, tokens, head_dim) by its strides */
    int64_t head_stride, token_stride;
    int64_t heads, tokens, head_dim, pairs;
    const float *table; /* (tokens, 2, pairs): cosines, sines */
    float *y; /* contiguous */
} RoPE;

/* Rows of K or V, (n_kv_heads, tokens, head_dim), F16 or F32; strides in bytes. */
typedef struct {
    const char *start;
    int64_t head_stride, token_stride;
    Format format;
} Rows;

/* Rows in 16 bits: (heads, tokens, head_dim) of both by their strides, head_dim a multiple of 32. */
typedef struct {
    const float *x;
    int64_t head_stride, token_stride;
    int64_t heads, tokens, head_dim;
    uint16_t *to;
    int64_t to_head_stride, to_token_stride;
} Write;

/* Tiles in this backend's order, (n_kv_heads, n, tile_words(head_dim)); see codec.h. */
typedef struct {
    const uint32_t *start;
    int64_t head_stride;
    int bits; /* 3 or 4 */
    int k_is_v; /* they hold V alone */
} Tiles;

typedef struct {
    Rows k, v; /* k.start NULL: V alone */
    int64_t heads, blocks, head_dim;
    int bits;
    uint32_t *tiles; /* contiguous */
} Seal;

typedef struct {
    Tiles tiles;
    int64_t heads, blocks, head_dim;
    float *k, *v; /* contiguous; k NULL where V is alone */
} Unseal;

/* kernels/view.py's KeysOfValues. A token is turned to where its block starts, and by its place in
 * the block: blocks start at positions 0, SINK, SINK + BLOCK and so on. Pairs are the channels i and
 * i + half, of those that turn. */
typedef struct {
    const float *weight; /* (head_dim,) */
    const float *starts; /* (blocks, 2, pairs): cosines, sines */
    const float *places; /* (BLOCK, 2, pairs) */
    int64_t blocks, pairs, half;
} Keys;

/* Consecutive tokens that lie in one way: tiles, or rows where tiles.start is NULL. Where V is
 * alone, tiles are so and k.start is NULL. */
typedef struct {
    Tiles tiles;
    Rows k, v;
    int64_t tokens;
} Span;

enum { MAX_SPANS = 4 };

typedef struct {
    const float *q; /* (n_heads, tokens, head_dim) by its strides */
    int64_t head_stride, token_stride;
    int64_t n_heads, n_kv_heads, tokens, head_dim;
    Span spans[MAX_SPANS]; /* all that is attended to; the query tokens are the last of it */
    int n_spans;
    float scale, softcap; /* softcap 0: none */
    const float *sinks; /* (n_heads,) or NULL */
    int64_t window; /* 0: none */
    float *out; /* (tokens, n_heads, head_dim) */
    Keys keys; /* of spans where V is alone */
} Attention;

typedef struct {
    const char *instruction_set;
    int (*linear)(const Linear *);
    int (*embed)(const Embed *);
    int (*rms_norm)(const RMSNorm *);
    int (*swiglu)(const SwiGLU *);
    int (*rope)(const RoPE *);
    int (*write)(const Write *);
    int (*seal)(const Seal *);
    int (*unseal)(const Unseal *);
    int (*attend_step)(const Attention *); /* few query tokens */
    int (*attend_chunk)(const Attention *); /* many */
} Kernels;

/* One table per instruction set; NULL where this compilation has no code for it. */
extern const Kernels *const kernels_avx512, *const kernels_avx2, *const kernels_base;

#endif
