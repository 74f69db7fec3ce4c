/* The codec of kernels/codec.py, bit for bit, on tiles in this backend's own order:
 *
 *     words                    what
 *     0        .. 4 head_dim   K codes: token t, channels 8 w to 8 w + 7 in word w * BLOCK + t
 *     4        .. 5 head_dim   K scale of each channel, then K mid of each, fp16
 *     5        .. 9 head_dim   V codes: channel c, tokens 8 o to 8 o + 7 in word o * head_dim + c
 *     9        .. 10 head_dim  per group of channels: V scale of each token, then V mid, fp16
 *
 * So neighbouring words are what attention computes side by side: tokens for K, channels for V.
 *
 * A tile that holds V alone has codes as V's, and then parameters as K's.
 *
 * With 3 bits, the last quarter of K's code words and of V's is given away to the free top bits of
 * the other three, word for word: bit i of each code to quarter i. */

typedef struct {
    const uint32_t *k, *v; /* codes, as with 4 bits; k NULL where V is alone */
    const uint16_t *scales, *mids; /* (head_dim,), of K, or of V alone */
    const uint16_t *v_parameters; /* (head_dim / GROUP, 2, BLOCK) */
    float half; /* a stored code is code + half */
} Tile;

static const uint32_t TOP_BITS = 0x88888888;

/* Four quarters of `n` words to three. */
static void narrow(const uint32_t *words, int64_t n, uint32_t *to) {
    for (int64_t i = 0; i < 3 * n; i += LANES) {
        vu last = load_words(words + 3 * n + i % n) << (3 - (int)(i / n));
        store_words(to + i, load_words(words + i) | (last & TOP_BITS));
    }
}

/* The reverse. */
static void widen(const uint32_t *words, int64_t n, uint32_t *to) {
    for (int64_t i = 0; i < n; i += LANES) {
        vu a = load_words(words + i), b = load_words(words + n + i);
        vu c = load_words(words + 2 * n + i);
        store_words(to + i, a & ~TOP_BITS);
        store_words(to + n + i, b & ~TOP_BITS);
        store_words(to + 2 * n + i, c & ~TOP_BITS);
        store_words(to + 3 * n + i,
                    (a & TOP_BITS) >> 3 | (b & TOP_BITS) >> 2 | (c & TOP_BITS) >> 1);
    }
}

/* Words of a tile. */
INLINE int64_t tile_size(int bits, int k_is_v, int64_t head_dim) {
    return (k_is_v ? 1 : 2) * (bits + 1) * head_dim;
}

INLINE const uint32_t *tile_words(const Tiles *tiles, int64_t head, int64_t block,
                                  int64_t head_dim) {
    return tiles->start + head * tiles->head_stride +
           block * tile_size(tiles->bits, tiles->k_is_v, head_dim);
}

/* Room for a tile's codes of 3 bits as with 4. */
typedef uint32_t Room[8 * MAX_HEAD_DIM];

INLINE Tile tile_at(const Tiles *tiles, int64_t head, int64_t block, int64_t head_dim,
                    uint32_t *room) {
    const uint32_t *k = tile_words(tiles, head, block, head_dim);
    const uint32_t *v = k + (tiles->bits + 1) * head_dim;
    const uint16_t *parameters = (const uint16_t *)(k + tiles->bits * head_dim);
    const uint16_t *v_parameters = (const uint16_t *)(v + tiles->bits * head_dim);
    float half = tiles->bits == 3 ? 4.0f : 8.0f;
    if (tiles->bits == 3) {
        widen(k, head_dim, room);
        k = room;
    }
    if (tiles->k_is_v)
        return (Tile){NULL, k, parameters, parameters + head_dim, NULL, half};
    if (tiles->bits == 3) {
        widen(v, head_dim, room + 4 * head_dim);
        v = room + 4 * head_dim;
    }
    return (Tile){k, v, parameters, parameters + head_dim, v_parameters, half};
}

/* A stored code is code + half, so x = (mid - half scale) + scale * stored. */
INLINE vf base_of(const Tile *tile, vf scale, vf mid) { return mid - splat(tile->half) * scale; }

INLINE const char *row_at(const Rows *rows, int64_t head, int64_t token) {
    return rows->start + head * rows->head_stride + token * rows->token_stride;
}

INLINE vf load_row(Format format, const char *row, int64_t channel) {
    if (format == F32)
        return load((const float *)row + channel);
    return load_half((const uint16_t *)row + channel);
}

/* Sealing */

INLINE vf saturated(vf x) {
    vi number = x == x;
    return min_of(max_of((vf)((vi)x & number), splat(-65504.0f)), splat(65504.0f));
}

INLINE vu code_of(vf x, vf mid, vf divisor, float half) {
    const vf magic = splat(0x1.8p23f); /* adding it rounds to an integer, ties to even */
    vf code = (x - mid) / divisor;
    code = min_of(max_of(code, splat(-half)), splat(half - 1));
    code = (code + magic) - magic;
    return (vu)__builtin_convertvector(code + splat(half), vi);
}

INLINE float divisor_of(uint16_t scale) {
    float divisor = half_to_float(scale);
    return divisor == 0 ? INFINITY : divisor;
}

/* One block of K, or of V alone: LANES channels at a time, side by side in the lanes. */
static void seal_channels(const Seal *s, int64_t head, int64_t block, uint32_t *to,
                          uint16_t *scales) {
    int64_t dim = s->head_dim;
    const Rows *rows = s->k.start ? &s->k : &s->v;
    float half = (float)(1 << (s->bits - 1));
    uint16_t *mids = scales + dim;
    for (int64_t c = 0; c < dim; c += LANES) {
        vf x[BLOCK], low = {0}, high = {0};
        for (int t = 0; t < BLOCK; t++) {
            x[t] = saturated(load_row(rows->format, row_at(rows, head, block * BLOCK + t), c));
            low = t ? min_of(low, x[t]) : x[t];
            high = t ? max_of(high, x[t]) : x[t];
        }
        vf step = (high - low) / splat(2 * half - 1), mid = low + splat(half) * step, divisor = {0};
        for (int i = 0; i < LANES; i++) {
            scales[c + i] = float_to_half(step[i]);
            mids[c + i] = float_to_half(mid[i]);
            divisor[i] = divisor_of(scales[c + i]);
            mid[i] = half_to_float(mids[c + i]);
        }
        if (!s->k.start) {
            for (int t = 0; t < BLOCK; t += 8) {
                vu word = {0};
                for (int i = 0; i < 8; i++)
                    word |= code_of(x[t + i], mid, divisor, half) << (4 * i);
                store_words(to + t / 8 * dim + c, word);
            }
            continue;
        }
        for (int t = 0; t < BLOCK; t += LANES) {
            vf codes[LANES];
            for (int i = 0; i < LANES; i++)
                codes[i] = (vf)code_of(x[t + i], mid, divisor, half);
            transpose(codes);
            for (int i = 0; i < LANES; i++) {
                int64_t channel = c + i;
                uint32_t *words = to + channel / 8 * BLOCK + t;
                vu others = channel % 8 ? load_words(words) : (vu){0};
                store_words(words, others | (vu)codes[i] << (4 * (channel % 8)));
            }
        }
    }
}

/* V of one block, one group of channels at a time. */
static void seal_v(const Seal *s, int64_t head, int64_t block, uint32_t *to,
                   uint16_t *parameters) {
    int64_t dim = s->head_dim;
    float half = (float)(1 << (s->bits - 1));
    memset(to, 0, 16 * (size_t)dim);
    for (int64_t group = 0; group < dim; group += GROUP, parameters += 2 * BLOCK) {
        for (int t = 0; t < BLOCK; t++) {
            const char *row = row_at(&s->v, head, block * BLOCK + t);
            vf x[GROUP / LANES], low = {0}, high = {0};
            for (int i = 0; i < GROUP / LANES; i++) {
                x[i] = saturated(load_row(s->v.format, row, group + i * LANES));
                low = i ? min_of(low, x[i]) : x[i];
                high = i ? max_of(high, x[i]) : x[i];
            }
            float smallest = -max_lane(-low), step = (max_lane(high) - smallest) / (2 * half - 1);
            uint16_t scale = float_to_half(step), mid = float_to_half(smallest + half * step);
            parameters[t] = scale;
            parameters[BLOCK + t] = mid;
            for (int i = 0; i < GROUP / LANES; i++) {
                uint32_t *words = to + t / 8 * dim + group + i * LANES;
                vu code = code_of(x[i], splat(half_to_float(mid)), splat(divisor_of(scale)), half);
                store_words(words, load_words(words) | code << (4 * (t % 8)));
            }
        }
    }
}

static void seal_piece(const void *of, int piece, int thread) {
    const Seal *s = of;
    int64_t head = piece / s->blocks, block = piece % s->blocks;
    int64_t dim = s->head_dim, bits = s->bits;
    uint32_t *k = s->tiles + piece * tile_size(s->bits, !s->k.start, dim), *v = k + (bits + 1) * dim;
    Room room;
    (void)thread;
    seal_channels(s, head, block, bits == 4 ? k : room, (uint16_t *)(k + bits * dim));
    if (bits == 3)
        narrow(room, dim, k);
    if (!s->k.start)
        return;
    seal_v(s, head, block, bits == 4 ? v : room, (uint16_t *)(v + bits * dim));
    if (bits == 3)
        narrow(room, dim, v);
}

static int seal(const Seal *s) {
    pool_run((int)(s->heads * s->blocks), seal_piece, s);
    return 1;
}

/* Finite in fp16: at the end of its range, rounded parameters may lead past it. */
INLINE float decoded(uint16_t scale, uint16_t mid, int code) {
    float x = half_to_float(mid) + half_to_float(scale) * (float)code;
    return fminf(fmaxf(x, -65504.0f), 65504.0f);
}

static void unseal_piece(const void *of, int piece, int thread) {
    const Unseal *u = of;
    int64_t dim = u->head_dim, head = piece / u->blocks, block = piece % u->blocks;
    Room room;
    Tile tile = tile_at(&u->tiles, head, block, dim, room);
    int half = (int)tile.half;
    float *k = u->k + piece * BLOCK * dim, *v = u->v + piece * BLOCK * dim;
    (void)thread;
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t c = 0; c < dim; c++) {
            int v_code = (int)(tile.v[t / 8 * dim + c] >> (4 * (t % 8)) & 15) - half;
            if (!tile.k) {
                v[t * dim + c] = decoded(tile.scales[c], tile.mids[c], v_code);
                continue;
            }
            int k_code = (int)(tile.k[c / 8 * BLOCK + t] >> (4 * (c % 8)) & 15) - half;
            const uint16_t *of_v = tile.v_parameters + c / GROUP * 2 * BLOCK + t;
            k[t * dim + c] = decoded(tile.scales[c], tile.mids[c], k_code);
            v[t * dim + c] = decoded(of_v[0], of_v[BLOCK], v_code);
        }
}

static int unseal(const Unseal *u) {
    pool_run((int)(u->heads * u->blocks), unseal_piece, u);
    return 1;
}
