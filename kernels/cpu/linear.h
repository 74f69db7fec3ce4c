/* Products with a matrix that stays as stored: one token at a time along its rows, or many tokens
 * in register blocks over panels of it that are dequantised into the cache. */

/* n elements from the i-th on. */
INLINE vf load_as(Format format, const void *p, int64_t i, int n) {
    if (format == F32)
        return n == LANES ? load((const float *)p + i) : load_n((const float *)p + i, n);
    const uint16_t *halves = (const uint16_t *)p + i;
    if (format == F16)
        return n == LANES ? load_half(halves) : load_half_n(halves, n);
    return n == LANES ? load_bfloat(halves) : load_bfloat_n(halves, n);
}

/* The code that is lowest in each word. */
INLINE vf lowest_code(Format format, vu words) {
    return format == Q8 ? low_byte(words) : format == Q4 ? nibble(words) : small_float(words);
}

INLINE int at_most(int64_t n, int most) { return n < most ? (int)n : most; }
INLINE int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* One token. Rows go four at a time, so that each vector of x is loaded once for four. */

enum {
    TOGETHER = 4,
    AHEAD = 16, /* rows, that are fetched before their turn */
};

typedef struct {
    const Linear *linear;
    const float *x; /* in the order that the format's rows are read in, zeros past the end */
    const float *group_sums; /* of x, per group, zeros past the end */
    int64_t rows_per_piece, n_groups;
    vi group_of_lane; /* of a word of 8 columns, from the group of lane 0 on */
    int group_shift;
} VectorJob;

/* x as nibbles come: for each block of 8 LANES columns, columns 8 i + j in vector j, lane i. */
static void order_by_nibble(const float *x, int64_t columns, float *ordered) {
    for (int64_t block = 0; block < columns; block += 8 * LANES)
        for (int j = 0; j < 8; j++)
            for (int i = 0; i < LANES; i++) {
                int64_t column = block + 8 * i + j;
                *ordered++ = column < columns ? x[column] : 0;
            }
}

/* Scales of TOGETHER rows as floats in `scales`, job->n_groups + LANES apart; sums[r] becomes
 * partial sums of the biases of row r times the sums of x. */
INLINE void row_parameters_as(Format format, const VectorJob *job, const int64_t *rows,
                              float *scales, vf *sums) {
    const Matrix *m = &job->linear->matrix;
    int64_t n = job->n_groups;
    for (int r = 0; r < TOGETHER; r++, scales += n + LANES) {
        vf sum = {0};
        int64_t g = 0, first = rows[r] * n;
        for (; g + LANES <= n; g += LANES) {
            store(scales + g, load_as(format, m->scales, first + g, LANES));
            sum += load_as(format, m->biases, first + g, LANES) * load(job->group_sums + g);
        }
        if (g < n) {
            int left = (int)(n - g);
            store(scales + g, load_as(format, m->scales, first + g, left));
            sum += load_as(format, m->biases, first + g, left) * load(job->group_sums + g);
        }
        sums[r] = sum;
    }
}

INLINE void row_parameters(const VectorJob *job, const int64_t *rows, float *scales, vf *sums) {
    switch (job->linear->matrix.parameters) {
    case F16: row_parameters_as(F16, job, rows, scales, sums); break;
    case BF16: row_parameters_as(BF16, job, rows, scales, sums); break;
    default: row_parameters_as(F32, job, rows, scales, sums); break;
    }
}

INLINE void rows_4bit(Format format, const VectorJob *job, const int64_t rows[TOGETHER],
                      float *scales, vf *out) {
    const Matrix *m = &job->linear->matrix;
    int64_t words = m->columns / 8, stride = job->n_groups + LANES;
    const uint32_t *data[TOGETHER];
    const float *x = job->x;
    vf sums[TOGETHER];
    row_parameters(job, rows, scales, sums);
    for (int r = 0; r < TOGETHER; r++)
        data[r] = (const uint32_t *)m->data + rows[r] * words;
    vi group_of_lane = job->group_of_lane;
    int shift = job->group_shift;
    for (int64_t w = 0; w < words; w += LANES, x += 8 * LANES) {
        vu codes[TOGETHER];
        vf products[TOGETHER];
        int n = at_most(words - w, LANES);
#pragma GCC unroll 4
        for (int r = 0; r < TOGETHER; r++) {
            codes[r] = n == LANES ? load_words(data[r] + w) : load_words_n(data[r] + w, n);
            __builtin_prefetch(data[r] + w + AHEAD * words, 0, 2);
            products[r] = lowest_code(format, codes[r]) * load(x);
        }
#pragma GCC unroll 8
        for (int j = 1; j < 8; j++) {
            vf xj = load(x + j * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < TOGETHER; r++)
                products[r] += lowest_code(format, codes[r] >> (4 * j)) * xj;
        }
        const float *scale = scales + (8 * w >> shift);
#pragma GCC unroll 4
        for (int r = 0; r < TOGETHER; r++)
            sums[r] += products[r] * pick(scale + r * stride, group_of_lane);
    }
    for (int r = 0; r < TOGETHER; r++)
        out[r] = sums[r];
}

INLINE void rows_q8(const VectorJob *job, const int64_t rows[TOGETHER], float *scales, vf *out) {
    const Matrix *m = &job->linear->matrix;
    int64_t stride = job->n_groups + LANES;
    const uint8_t *data[TOGETHER];
    vf sums[TOGETHER];
    row_parameters(job, rows, scales, sums);
    for (int r = 0; r < TOGETHER; r++)
        data[r] = (const uint8_t *)m->data + rows[r] * m->columns;
    for (int64_t c = 0, g = 0; c < m->columns; g++) {
        vf products[TOGETHER] = {{0}};
        for (int64_t end = c + m->group_size; c < end; c += LANES) {
            vf x = load(job->x + c);
#pragma GCC unroll 4
            for (int r = 0; r < TOGETHER; r++) {
                products[r] += load_bytes(data[r] + c) * x;
                __builtin_prefetch(data[r] + c + AHEAD * m->columns, 0, 2);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < TOGETHER; r++)
            sums[r] += products[r] * splat(scales[r * stride + g]);
    }
    for (int r = 0; r < TOGETHER; r++)
        out[r] = sums[r];
}

INLINE void rows_dense(Format format, const VectorJob *job, const int64_t rows[TOGETHER], vf *sums) {
    const Matrix *m = &job->linear->matrix;
    int64_t c = 0;
    for (int r = 0; r < TOGETHER; r++)
        sums[r] = (vf){0};
    for (; c + LANES <= m->columns; c += LANES) {
        vf x = load(job->x + c);
#pragma GCC unroll 4
        for (int r = 0; r < TOGETHER; r++)
            sums[r] += load_as(format, m->data, rows[r] * m->columns + c, LANES) * x;
    }
    int left = (int)(m->columns - c);
    for (int r = 0; left && r < TOGETHER; r++)
        sums[r] += load_as(format, m->data, rows[r] * m->columns + c, left) * load(job->x + c);
}

static void vector_piece(const void *of, int piece, int thread) {
    const VectorJob *job = of;
    const Linear *l = job->linear;
    int64_t start = piece * job->rows_per_piece, end = start + job->rows_per_piece;
    end = end < l->matrix.rows ? end : l->matrix.rows;
    for (int64_t row = start; row < end; row += LANES) {
        int n = at_most(end - row, LANES);
        vf sums[LANES];
        for (int r = 0; r < LANES; r += TOGETHER) {
            int64_t rows[TOGETHER];
            for (int i = 0; i < TOGETHER; i++)
                rows[i] = row + (r + i < n ? r + i : n - 1);
            switch (l->matrix.format) {
            case Q4: rows_4bit(Q4, job, rows, pool_scratch(thread), sums + r); break;
            case E2M1: rows_4bit(E2M1, job, rows, pool_scratch(thread), sums + r); break;
            case Q8: rows_q8(job, rows, pool_scratch(thread), sums + r); break;
            case F32: rows_dense(F32, job, rows, sums + r); break;
            case F16: rows_dense(F16, job, rows, sums + r); break;
            default: rows_dense(BF16, job, rows, sums + r); break;
            }
        }
        vf y = sum_rows(sums);
        if (l->bias)
            y += load_n(l->bias + row, n);
        store_n(l->y + row, y, n);
    }
}

static int linear_vector(const Linear *l) {
    const Matrix *m = &l->matrix;
    int64_t n_groups = m->group_size ? m->columns / m->group_size : 0;
    int64_t ordered = rounded_up(m->columns, 8 * LANES), sums = rounded_up(n_groups, LANES);
    if (!pool_reserve(4 * (size_t)(TOGETHER * (n_groups + LANES)), 4 * (size_t)(ordered + sums)))
        return 0;
    float *x = pool_shared(), *group_sums = x + ordered;
    VectorJob job = {l, x, group_sums, 0, n_groups, {0}, 0};
    if (m->format == Q4 || m->format == E2M1) {
        order_by_nibble(l->x, m->columns, x);
    } else {
        memcpy(x, l->x, 4 * (size_t)m->columns);
        memset(x + m->columns, 0, 4 * (size_t)(ordered - m->columns));
    }
    memset(group_sums, 0, 4 * (size_t)sums);
    for (int64_t g = 0; g < n_groups; g++) {
        vf sum = {0};
        for (int64_t c = 0; c < m->group_size; c += LANES)
            sum += load(l->x + g * m->group_size + c);
        group_sums[g] = sum_lanes(sum);
    }
    if (n_groups) {
        job.group_shift = __builtin_ctz((unsigned)m->group_size);
        for (int i = 0; i < LANES; i++)
            job.group_of_lane[i] = 8 * i >> job.group_shift;
    }
    job.rows_per_piece = rounded_up(m->rows / (4 * pool_size()) + 1, LANES);
    pool_run((int)((m->rows + job.rows_per_piece - 1) / job.rows_per_piece), vector_piece, &job);
    return 1;
}

/* Many tokens. The register block is MR rows of x by NR = 2 LANES columns of y. */

#if defined(TARGET_AVX512) || defined(__aarch64__)
enum { MR = 12 };
#else
enum { MR = 6 };
#endif
enum {
    NR = 2 * LANES,
    DEPTH = 256, /* columns of the matrix in one panel */
    STRIDE = DEPTH + 16, /* between rows of a block of x; no power of two, for the cache's sake */
    PANELS = 4, /* at most, that one thread holds */
};

/* c = a times panel, or plus it where `add`; a has m rows STRIDE apart, panel is (depth, NR). Of c
 * only the first n columns are there; without `add` it starts from `start`, (n,), or from zero. */
INLINE void multiply_block(int m, const float *a, const float *panel, int64_t depth, float *c,
                           int64_t c_stride, int n, const float *start, int add) {
    vf sums[MR][2];
    int n0 = n < LANES ? n : LANES, n1 = n - n0;
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
        const float *from = add ? c + i * c_stride : start;
        if (!from) {
            sums[i][0] = sums[i][1] = (vf){0};
        } else if (n == NR) {
            sums[i][0] = load(from);
            sums[i][1] = load(from + LANES);
        } else {
            sums[i][0] = load_n(from, n0);
            sums[i][1] = load_n(from + n0, n1);
        }
    }
    for (int64_t k = 0; k < depth; k++) {
        vf b0 = load(panel + k * NR), b1 = load(panel + k * NR + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < m; i++) {
            vf x = splat(a[i * STRIDE + k]);
            sums[i][0] += x * b0;
            sums[i][1] += x * b1;
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < m; i++) {
        float *to = c + i * c_stride;
        if (n == NR) {
            store(to, sums[i][0]);
            store(to + LANES, sums[i][1]);
        } else {
            store_n(to, sums[i][0], n0);
            store_n(to + n0, sums[i][1], n1);
        }
    }
}

static void multiply(int m, const float *a, const float *panel, int64_t depth, float *c,
                     int64_t c_stride, int n, const float *start, int add) {
    switch (m) {
#define CASE(m) \
    case m: multiply_block(m, a, panel, depth, c, c_stride, n, start, add); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if defined(TARGET_AVX512) || defined(__aarch64__)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
    }
}

/* LANES rows of words or floats from `start` on, transposed; rows past n_rows are zero. */
INLINE void load_square(const float *start, int64_t stride, int n_rows, int n, vf square[LANES]) {
    if (n_rows >= LANES && n == LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            square[i] = load(start + i * stride);
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            square[i] = i < n_rows ? load_n(start + i * stride, n) : (vf){0};
    }
    transpose(square);
}

/* Columns first to first + depth - 1 of LANES rows of a quantised matrix, (depth, NR) from `panel`
 * on. Lanes are rows, so that no order of columns is disturbed. */
INLINE void fill_quantised(Format format, const Matrix *m, int64_t row, int64_t first,
                           int64_t depth, float *panel) {
    const int bits = format == Q8 ? 8 : 4, per_word = 32 / bits;
    int n_rows = at_most(m->rows - row, LANES);
    int64_t row_words = m->columns / per_word, row_groups = m->columns / m->group_size;
    int64_t groups = depth / m->group_size;
    int shift = __builtin_ctz((unsigned)m->group_size);
    const float *words = (const float *)m->data + row * row_words + first / per_word;
    vf scales[DEPTH / 32 + LANES], biases[DEPTH / 32 + LANES];
    for (int64_t g = 0; g < groups; g += LANES) {
        int64_t from = row * row_groups + first / m->group_size + g;
        int n = at_most(groups - g, LANES);
        for (int i = 0; i < LANES; i++) {
            int there = i < n_rows;
            int64_t at = from + i * row_groups;
            scales[g + i] = there ? load_as(m->parameters, m->scales, at, n) : (vf){0};
            biases[g + i] = there ? load_as(m->parameters, m->biases, at, n) : (vf){0};
        }
        transpose(scales + g);
        transpose(biases + g);
    }
    for (int64_t w = 0; w < depth / per_word; w += LANES) {
        vf square[LANES];
        int n = at_most(depth / per_word - w, LANES);
        load_square(words + w, row_words, n_rows, n, square);
        for (int i = 0; i < n; i++) {
            vu codes = (vu)square[i];
            int64_t g = (w + i) * per_word >> shift;
            vf scale = scales[g], bias = biases[g];
#pragma GCC unroll 8
            for (int j = 0; j < per_word; j++) {
                vf code = lowest_code(format, codes >> (bits * j));
                store(panel, code * scale + bias);
                panel += NR;
            }
        }
    }
}

INLINE void fill_dense(Format format, const Matrix *m, int64_t row, int64_t first, int64_t depth,
                       float *panel) {
    int n_rows = at_most(m->rows - row, LANES);
    for (int64_t k = 0; k < depth; k += LANES) {
        vf square[LANES];
        int n = at_most(depth - k, LANES);
        for (int i = 0; i < LANES; i++) {
            int64_t at = (row + i) * m->columns + first + k;
            square[i] = i < n_rows ? load_as(format, m->data, at, n) : (vf){0};
        }
        transpose(square);
        for (int i = 0; i < n; i++)
            store(panel + (k + i) * NR, square[i]);
    }
}

/* Rows row to row + NR - 1 of the matrix, transposed: (depth, NR). */
static void fill_panel(const Matrix *m, int64_t row, int64_t first, int64_t depth, float *panel) {
    for (int half = 0; half < 2; half++, row += LANES, panel += LANES) {
        switch (m->format) {
        case Q4: fill_quantised(Q4, m, row, first, depth, panel); break;
        case E2M1: fill_quantised(E2M1, m, row, first, depth, panel); break;
        case Q8: fill_quantised(Q8, m, row, first, depth, panel); break;
        case F32: fill_dense(F32, m, row, first, depth, panel); break;
        case F16: fill_dense(F16, m, row, first, depth, panel); break;
        default: fill_dense(BF16, m, row, first, depth, panel); break;
        }
    }
}

typedef struct {
    const Linear *linear;
    int64_t panels, depth; /* of one piece, of one panel */
} MatrixJob;

static void matrix_piece(const void *of, int piece, int thread) {
    const MatrixJob *job = of;
    const Linear *l = job->linear;
    const Matrix *m = &l->matrix;
    float *panels = pool_scratch(thread), *x = panels + PANELS * DEPTH * NR;
    int64_t start = piece * job->panels * NR, end = start + job->panels * NR;
    end = end < m->rows ? end : m->rows;
    for (int64_t first = 0; first < m->columns; first += job->depth) {
        int64_t depth = at_most(m->columns - first, (int)job->depth);
        float *panel = panels;
        for (int64_t row = start; row < end; row += NR, panel += DEPTH * NR)
            fill_panel(m, row, first, depth, panel);
        for (int64_t token = 0; token < l->tokens; token += MR) {
            int tokens = at_most(l->tokens - token, MR);
            for (int i = 0; i < tokens; i++)
                memcpy(x + i * STRIDE, l->x + (token + i) * m->columns + first, 4 * (size_t)depth);
            panel = panels;
            for (int64_t row = start; row < end; row += NR, panel += DEPTH * NR)
                multiply(tokens, x, panel, depth, l->y + token * m->rows + row, m->rows,
                         at_most(m->rows - row, NR), l->bias ? l->bias + row : NULL, first > 0);
        }
    }
}

static int linear_matrix(const Linear *l) {
    const Matrix *m = &l->matrix;
    if (!pool_reserve(4 * (PANELS * DEPTH * NR + MR * STRIDE), 0))
        return 0;
    int64_t parts = (m->columns + DEPTH - 1) / DEPTH;
    int64_t whole = m->group_size > 32 ? m->group_size : 32;
    int64_t n_panels = (m->rows + NR - 1) / NR;
    int64_t panels = at_most(n_panels / (4 * pool_size()), PANELS);
    panels = panels ? panels : 1;
    MatrixJob job = {l, panels, rounded_up((m->columns + parts - 1) / parts, whole)};
    pool_run((int)((n_panels + panels - 1) / panels), matrix_piece, &job);
    return 1;
}

static int linear(const Linear *l) {
    return l->tokens == 1 ? linear_vector(l) : linear_matrix(l);
}

/* Rows by number */

static void embed_piece(const void *of, int token, int thread) {
    const Embed *e = of;
    const Matrix *m = &e->matrix;
    int64_t row = e->ids[token];
    float *y = e->y + token * m->columns;
    (void)thread;
    if (m->format != Q4 && m->format != E2M1 && m->format != Q8) {
        for (int64_t c = 0; c < m->columns; c += LANES) {
            int n = at_most(m->columns - c, LANES);
            store_n(y + c, load_as(m->format, m->data, row * m->columns + c, n), n);
        }
        return;
    }
    int64_t groups = m->columns / m->group_size;
    const uint8_t *bytes = m->data;
    for (int64_t g = 0; g < groups; g++) {
        float scale = load_as(m->parameters, m->scales, row * groups + g, 1)[0];
        float bias = load_as(m->parameters, m->biases, row * groups + g, 1)[0];
        for (int64_t c = g * m->group_size; c < (g + 1) * m->group_size; c++) {
            int64_t at = row * m->columns + c;
            int code = m->format == Q8 ? bytes[at] : bytes[at / 2] >> (4 * (at % 2)) & 15;
            vu word = {(uint32_t)code};
            y[c] = scale * lowest_code(m->format, word)[0] + bias;
        }
    }
}

static int embed(const Embed *e) {
    pool_run((int)e->tokens, embed_piece, e);
    return 1;
}
