//! The generator behind seeded sampling: PCG XSL-RR 128/64, seeded through NumPy's `SeedSequence`.
//!
//! Written from the published algorithms (M. O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good
//! Algorithms for Random Number Generation", 2014; NumPy's documentation of `SeedSequence` and `PCG64`), so that a seed gives
//! the draws of `numpy.random.default_rng(seed).random()`.

/// PCG XSL-RR 128/64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    /// The stream of `seed`.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        let [state_high, state_low, stream_high, stream_low] = SeedSequence::new(seed).words();
        let mut pcg = Self { state: 0, increment: (join(stream_high, stream_low) << 1) | 1 };
        pcg.step();
        pcg.state = pcg.state.wrapping_add(join(state_high, state_low));
        pcg.step();
        pcg
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// The next number of `[0, 1)`, a multiple of 2⁻⁵³.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }
}

/// Spreads an integer seed over a pool of four words.
struct SeedSequence {
    pool: [u32; POOL_WORDS],
}

impl SeedSequence {
    fn new(seed: u64) -> Self {
        // A seed below 2³² is one word of entropy, otherwise two; both fit the pool, which is filled up with zeros.
        let entropy = [seed as u32, (seed >> 32) as u32, 0, 0];
        let mut hash = Hash::new(INIT_A, MULTIPLY_A);
        let mut pool = entropy.map(|word| hash.apply(word));
        for source in 0..POOL_WORDS {
            for target in 0..POOL_WORDS {
                if source != target {
                    pool[target] = mix(pool[target], hash.apply(pool[source]));
                }
            }
        }
        Self { pool }
    }

    /// Four 64-bit words of seed state.
    fn words(&self) -> [u64; 4] {
        let mut hash = Hash::new(INIT_B, MULTIPLY_B);
        let mut halves = [0u32; 8];
        for (index, half) in halves.iter_mut().enumerate() {
            *half = hash.apply(self.pool[index % POOL_WORDS]);
        }
        std::array::from_fn(|word| u64::from(halves[2 * word]) | (u64::from(halves[2 * word + 1]) << 32))
    }
}

/// The running multiplicative hash of `SeedSequence`.
struct Hash {
    constant: u32,
    multiplier: u32,
}

impl Hash {
    fn new(constant: u32, multiplier: u32) -> Self {
        Self { constant, multiplier }
    }

    fn apply(&mut self, word: u32) -> u32 {
        let word = word ^ self.constant;
        self.constant = self.constant.wrapping_mul(self.multiplier);
        let word = word.wrapping_mul(self.constant);
        word ^ (word >> 16)
    }
}

fn mix(left: u32, right: u32) -> u32 {
    let mixed = left.wrapping_mul(MIX_LEFT).wrapping_sub(right.wrapping_mul(MIX_RIGHT));
    mixed ^ (mixed >> 16)
}

fn join(high: u64, low: u64) -> u128 {
    (u128::from(high) << 64) | u128::from(low)
}

const MULTIPLIER: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
const POOL_WORDS: usize = 4;
const INIT_A: u32 = 0x43B0_D7E5;
const MULTIPLY_A: u32 = 0x931E_8875;
const INIT_B: u32 = 0x8B51_F9DD;
const MULTIPLY_B: u32 = 0x58F3_8DED;
const MIX_LEFT: u32 = 0xCA01_F9DD;
const MIX_RIGHT: u32 = 0x4973_F715;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_beyond_one_word_follow_numpy() {
        // numpy.random.default_rng(seed).random(2), NumPy 2.
        for (seed, wanted) in SEEDS {
            let mut pcg = Pcg64::seeded(seed);
            assert_eq!([pcg.next_f64(), pcg.next_f64()], wanted, "seed {seed}");
        }
    }

    const SEEDS: [(u64, [f64; 2]); 4] = [
        (4_294_967_295, [0.251_943_568_044_996_5, 0.219_065_796_286_856_63]),
        (4_294_967_296, [0.889_738_791_278_134_3, 0.557_138_050_206_226_3]),
        (1_099_511_640_121, [0.190_123_553_225_955_98, 0.802_302_405_974_518_2]),
        (9_223_372_036_854_775_807, [0.175_466_124_302_781_3, 0.469_928_651_401_509_1]),
    ];
}
