//! The designs for the programs of this crate.

use super::{COPY, Kit, KitError, VECTOR_SCALE, await_token, dev_gen, image, linear_task};
use crate::array::program::ProgramDescription;
use npuhal_amdxdna::format::registers::Direction;
use npuhal_amdxdna::format::txn::{Builder, Header, Version};
use npuhal_amdxdna::silicon::Silicon;

/// Copies `words` 32-bit words from buffer 0 to buffer 1: `streams` (1, 2, 4 or 8 and so on: columns times one or two
/// channels) equal parts at the same time, in portions of `portion_words`.
///
/// # Errors
/// [`KitError::Shape`] where the numbers do not divide or the part has fewer streams.
pub fn copy(silicon: Silicon, version: Version, words: u32, streams: u8, portion_words: u32) -> Result<Kit, KitError> {
    let shape = |reason| KitError::Shape { design: "copy", reason };
    let facts = silicon.facts();
    let columns = u32::from(streams).min(facts.columns - facts.unusable_columns);
    if columns == 0 || !u32::from(streams).is_multiple_of(columns) || u32::from(streams) / columns > 2 {
        return Err(shape(format!("{streams} streams on {columns} columns with two channels each")));
    }
    let channels = u32::from(streams) / columns;
    let part_words = words / u32::from(streams);
    if portion_words == 0
        || words == 0
        || part_words * u32::from(streams) != words
        || !part_words.is_multiple_of(portion_words)
    {
        return Err(shape(format!("{words} words in {streams} streams of portions of {portion_words}")));
    }
    let program = ProgramDescription { id: COPY, dimensions: vec![columns, channels, portion_words] };
    let columns = columns as u8;
    let mut code = Builder::new(Header::new(version, dev_gen(silicon), columns));
    let lanes: Vec<(u8, u8)> =
        (0..columns).flat_map(|column| (0..channels as u8).map(move |channel| (column, channel))).collect();
    for (i, &(column, channel)) in lanes.iter().enumerate() {
        let offset_bytes = 4 * u64::from(part_words) * i as u64;
        linear_task(&mut code, column, Direction::S2mm, channel, 2 * channel, part_words, 1, offset_bytes)?;
        linear_task(&mut code, column, Direction::Mm2s, channel, 2 * channel + 1, part_words, 0, offset_bytes)?;
    }
    for (column, channel) in lanes {
        code.wait(await_token(Direction::S2mm, column, channel));
    }
    let image = image(columns, &program)?;
    Ok(Kit { name: "copy".to_owned(), columns, image, image_id: COPY as u16, code: code.into_stream(), buffers: 2 })
}

/// Multiplies `elements` 32-bit integers of buffer 0 by the one of buffer 1 into buffer 2.
///
/// # Errors
/// [`KitError::Shape`] where `portion` does not divide `elements`.
pub fn vector_scale(silicon: Silicon, version: Version, elements: u32, portion: u32) -> Result<Kit, KitError> {
    if portion == 0 || elements == 0 || !elements.is_multiple_of(portion) {
        let reason = format!("{elements} elements in portions of {portion}");
        return Err(KitError::Shape { design: "vector-scale", reason });
    }
    let program = ProgramDescription { id: VECTOR_SCALE, dimensions: vec![elements, portion] };
    let mut code = Builder::new(Header::new(version, dev_gen(silicon), 1));
    linear_task(&mut code, 0, Direction::S2mm, 0, 0, elements, 2, 0)?;
    linear_task(&mut code, 0, Direction::Mm2s, 1, 1, 1, 1, 0)?;
    linear_task(&mut code, 0, Direction::Mm2s, 0, 2, elements, 0, 0)?;
    code.wait(await_token(Direction::S2mm, 0, 0));
    let image = image(1, &program)?;
    let (name, image_id) = ("vector_scale".to_owned(), VECTOR_SCALE as u16);
    Ok(Kit { name, columns: 1, image, image_id, code: code.into_stream(), buffers: 3 })
}
