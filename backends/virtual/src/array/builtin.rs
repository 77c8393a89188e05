//! The small programs that come with the virtual array.

use super::program::{CoreProgram, CoreProgramTable, Step, StreamKey, Streams};
use crate::kit::{COPY, VECTOR_SCALE};

/// Largest portion of a step in words: a core's data memory.
const MAX_PORTION_WORDS: u32 = 16 << 10;

pub(super) fn register(table: &mut CoreProgramTable) {
    // An empty table has no id twice.
    let _ = table.register(COPY, "copy", |dimensions| Ok(Box::new(Copy::new(dimensions)?)));
    let _ = table.register(VECTOR_SCALE, "vector-scale", |dimensions| Ok(Box::new(VectorScale::new(dimensions)?)));
}

/// Copies each input stream to the output stream of the same column and channel, portion by portion.
///
/// Dimensions: columns, channels a column (1 or 2), words of a portion.
#[derive(Debug)]
struct Copy {
    lanes: Vec<Lane>,
    portion: Vec<u8>,
}

#[derive(Debug)]
struct Lane {
    column: u8,
    channel: u8,
}

impl Copy {
    fn new(dimensions: &[u32]) -> Result<Self, String> {
        let [columns, channels, words] = fixed(dimensions)?;
        check("columns", columns, 1..=8)?;
        check("channels", channels, 1..=2)?;
        check("portion words", words, 1..=MAX_PORTION_WORDS)?;
        let lanes = (0..columns).flat_map(|column| (0..channels).map(move |channel| (column as u8, channel as u8)));
        let lanes = lanes.map(|(column, channel)| Lane { column, channel }).collect();
        Ok(Self { lanes, portion: vec![0; 4 * words as usize] })
    }
}

impl CoreProgram for Copy {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        for lane in &self.lanes {
            let (input, output) =
                (StreamKey::input(lane.column, lane.channel), StreamKey::output(lane.column, lane.channel));
            if streams.has_room(output, self.portion.len())
                && streams.read(input, &mut self.portion)
                && streams.write(output, &self.portion)
            {
                return Step::Progress;
            }
        }
        Step::Waiting
    }

    fn unfinished(&self) -> Option<String> {
        None
    }
}

/// Multiplies 32-bit integers by a factor: `out[i] = in[i] * factor`, wrapping.
///
/// Column 0: vector on input channel 0, one factor a vector on input channel 1, result on output channel 0.
/// Dimensions: elements of the vector, elements of a portion (a divisor of the former).
#[derive(Debug)]
struct VectorScale {
    elements: u32,
    portion: Vec<u8>,
    /// Factor of the vector in progress, and elements done.
    factor: Option<i32>,
    done: u32,
}

impl VectorScale {
    fn new(dimensions: &[u32]) -> Result<Self, String> {
        let [elements, portion] = fixed(dimensions)?;
        check("portion elements", portion, 1..=MAX_PORTION_WORDS)?;
        if elements == 0 || !elements.is_multiple_of(portion) {
            return Err(format!("{elements} elements; wanted a multiple of the portion of {portion}"));
        }
        Ok(Self { elements, portion: vec![0; 4 * portion as usize], factor: None, done: 0 })
    }
}

impl CoreProgram for VectorScale {
    fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        let factor = match self.factor {
            Some(factor) => factor,
            None => {
                let mut word = [0; 4];
                if !streams.read(StreamKey::input(0, 1), &mut word) {
                    return Step::Waiting;
                }
                self.factor = Some(i32::from_le_bytes(word));
                return Step::Progress;
            }
        };
        let output = StreamKey::output(0, 0);
        if !streams.has_room(output, self.portion.len()) || !streams.read(StreamKey::input(0, 0), &mut self.portion) {
            return Step::Waiting;
        }
        for word in self.portion.chunks_exact_mut(4) {
            let element = i32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            word.copy_from_slice(&element.wrapping_mul(factor).to_le_bytes());
        }
        // There was room before the read.
        let _ = streams.write(output, &self.portion);
        self.done += self.portion.len() as u32 / 4;
        if self.done == self.elements {
            (self.factor, self.done) = (None, 0);
        }
        Step::Progress
    }

    fn unfinished(&self) -> Option<String> {
        self.factor.map(|_| format!("{} of {} elements scaled", self.done, self.elements))
    }
}

fn fixed<const N: usize>(dimensions: &[u32]) -> Result<[u32; N], String> {
    dimensions.try_into().map_err(|_| format!("{} dimensions; wanted {N}", dimensions.len()))
}

fn check(what: &str, value: u32, range: std::ops::RangeInclusive<u32>) -> Result<(), String> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(format!("{value} {what}; wanted {} to {}", range.start(), range.end()))
}
