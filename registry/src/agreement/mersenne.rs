//! The Mersenne Twister MT19937 (M. Matsumoto, T. Nishimura, 1998) with seeding by array and 53-bit numbers of `[0, 1)`, so
//! that a seed gives the draws of Python's `random.Random(seed).random()`.

const WORDS: usize = 624;
const OFFSET: usize = 397;

pub(super) struct Mersenne {
    state: [u32; WORDS],
    next: usize,
}

impl Mersenne {
    pub(super) fn seeded(seed: u64) -> Self {
        let key = [seed as u32, (seed >> 32) as u32];
        let key = if key[1] == 0 { &key[..1] } else { &key[..] };
        let mut state = initial(19_650_218);
        let (mut at, mut of_key) = (1, 0);
        for _ in 0..WORDS {
            let mixed = (state[at - 1] ^ (state[at - 1] >> 30)).wrapping_mul(1_664_525);
            state[at] = (state[at] ^ mixed).wrapping_add(key[of_key]).wrapping_add(of_key as u32);
            of_key = (of_key + 1) % key.len();
            advance(&mut state, &mut at);
        }
        for _ in 1..WORDS {
            let mixed = (state[at - 1] ^ (state[at - 1] >> 30)).wrapping_mul(1_566_083_941);
            state[at] = (state[at] ^ mixed).wrapping_sub(at as u32);
            advance(&mut state, &mut at);
        }
        state[0] = 0x8000_0000;
        Self { state, next: WORDS }
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == WORDS {
            for at in 0..WORDS {
                let joined = (self.state[at] & 0x8000_0000) | (self.state[(at + 1) % WORDS] & 0x7FFF_FFFF);
                let twist = if joined & 1 == 0 { 0 } else { 0x9908_B0DF };
                self.state[at] = self.state[(at + OFFSET) % WORDS] ^ (joined >> 1) ^ twist;
            }
            self.next = 0;
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9D2C_5680;
        word ^= (word << 15) & 0xEFC6_0000;
        word ^ (word >> 18)
    }

    /// The next number of `[0, 1)`, a multiple of 2⁻⁵³.
    pub(super) fn next_f64(&mut self) -> f64 {
        let (high, low) = (u64::from(self.next_u32() >> 5), u64::from(self.next_u32() >> 6));
        ((high << 26) + low) as f64 / 9_007_199_254_740_992.0
    }

    /// A number between `low` and `high`.
    pub(super) fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.next_f64()
    }
}

fn initial(seed: u32) -> [u32; WORDS] {
    let mut state = [seed; WORDS];
    for at in 1..WORDS {
        let mixed = state[at - 1] ^ (state[at - 1] >> 30);
        state[at] = mixed.wrapping_mul(1_812_433_253).wrapping_add(at as u32);
    }
    state
}

/// The next place; behind the last one the state starts again with its last word in front.
fn advance(state: &mut [u32; WORDS], at: &mut usize) {
    *at += 1;
    if *at == WORDS {
        state[0] = state[WORDS - 1];
        *at = 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_those_of_python() {
        // random.Random(seed).random(), Python 3.
        for (seed, wanted) in [(42, [0.639_426_798_457_883_7, 0.025_010_755_222_666_936]), SEED_0, SEED_WIDE] {
            let mut mersenne = Mersenne::seeded(seed);
            assert_eq!([mersenne.next_f64(), mersenne.next_f64()], wanted, "seed {seed}");
        }
    }

    const SEED_0: (u64, [f64; 2]) = (0, [0.844_421_851_525_048_1, 0.757_954_402_940_302_5]);
    const SEED_WIDE: (u64, [f64; 2]) = (1_099_511_640_121, [0.310_362_222_412_872_26, 0.114_893_086_283_633_6]);
}
