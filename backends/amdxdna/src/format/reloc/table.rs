//! The patch table of one section.

use super::{RelocError, Schema};
use crate::format::bytes::u32_at;
use crate::format::elf::Program;
use crate::format::registers::HOST_APERTURE;
use std::collections::HashMap;
use std::ops::Range;

/// A name that values are given for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatchSymbol {
    /// Argument name or index, or a special name.
    pub name: String,
    /// How its values are inserted in this section.
    pub schema: Schema,
    /// Largest symbol size: buffer bytes, or the mask of a scalar.
    pub size: u32,
}

/// Bytes of two sections that are compared at once.
const LINE_BYTES: usize = 64;

/// A resolved place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Site {
    /// Byte offset of word 0.
    at: u32,
    /// Index of the symbol.
    symbol: u32,
    schema: Schema,
    /// Scalars: bits that are replaced.
    mask: u32,
    /// Others: address in the template, plus addend and aperture.
    base: u64,
}

/// All patches of one section, resolved against its template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PatchTable {
    template_bytes: usize,
    symbols: Vec<PatchSymbol>,
    /// By offset.
    sites: Vec<Site>,
    /// Bits that the sites write, by word offset, ascending.
    written: Vec<(u32, u32)>,
}

/// What turns an image of one program into that of another, apart from the new program's own patches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebind {
    template_bytes: usize,
    words: Vec<RebindWord>,
    /// Sites of the new program, by index, that the old one does not have: another place, symbol, or address behind it.
    moved_sites: Vec<u32>,
}

/// A word that is rewritten; bits in `keep` belong to patches of the new program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RebindWord {
    at: u32,
    bits: u32,
    keep: u32,
}

impl Rebind {
    /// Words that are rewritten.
    pub fn word_count(&self) -> usize {
        self.words.len()
    }

    fn write_words(&self, image: &mut [u8], start: usize, changed: &mut Vec<Range<u32>>) {
        for word in &self.words {
            merge_word(image, word.at, word.bits, !word.keep, &mut |range| push_range(changed, start, range));
        }
    }
}

/// Collects a [`PatchTable`].
struct Resolver<'a> {
    template: &'a [u8],
    table: PatchTable,
    by_name: HashMap<String, u32>,
    /// Symbol of the site before: neighbours often have the same.
    last_symbol: usize,
    /// What the sites write, in their order.
    claims: Vec<Claim>,
}

/// Bits of a word that a site writes.
struct Claim {
    word_at: u32,
    bits: u32,
    symbol: u32,
}

impl PatchTable {
    /// Table of section `section` of `program`; `template` is that section's content.
    pub fn of_section(program: &Program, section: u32, template: &[u8]) -> Result<Self, RelocError> {
        let mut resolver = Resolver::new(template);
        for (entry, symbol) in program.relocations_of(section) {
            let schema = Schema::from_number(entry.schema)?;
            resolver.add(&symbol.name, schema, symbol.size, entry.offset, entry.addend)?;
        }
        resolver.finish()
    }

    /// Table from (name, schema, mask or size, byte offset, addend).
    pub fn new<'n>(
        template: &[u8],
        patches: impl IntoIterator<Item = (&'n str, Schema, u32, u32, u32)>,
    ) -> Result<Self, RelocError> {
        let mut resolver = Resolver::new(template);
        for (name, schema, size, offset, addend) in patches {
            resolver.add(name, schema, size, offset, addend)?;
        }
        resolver.finish()
    }

    /// Names that need values, in the order of [`apply`](Self::apply).
    pub fn symbols(&self) -> &[PatchSymbol] {
        &self.symbols
    }

    /// Number of places.
    pub fn site_count(&self) -> usize {
        self.sites.len()
    }

    /// Size of the section in bytes.
    pub fn template_bytes(&self) -> usize {
        self.template_bytes
    }

    /// Inserts `values`, one for each symbol, into an image of the section, and appends the byte ranges that changed
    /// to `changed`: ascending, whole words, neighbours joined.
    ///
    /// The image is the template, or the template after earlier applications of this table. Nothing is written unless
    /// all values can be.
    pub fn apply(&self, values: &[u64], image: &mut [u8], changed: &mut Vec<Range<u32>>) -> Result<(), RelocError> {
        self.check_all(values, image)?;
        self.write_all(values, image, changed.len(), changed);
        Ok(())
    }

    /// Refuses values and images that do not fit, before anything is written.
    fn check_all(&self, values: &[u64], image: &[u8]) -> Result<(), RelocError> {
        self.check_sizes(values, image)?;
        for site in &self.sites {
            self.check(site, values[site.symbol as usize])?;
        }
        Ok(())
    }

    fn check_sizes(&self, values: &[u64], image: &[u8]) -> Result<(), RelocError> {
        if values.len() != self.symbols.len() {
            return Err(RelocError::ValueCount { wanted: self.symbols.len(), found: values.len() });
        }
        if image.len() != self.template_bytes {
            return Err(RelocError::ImageSize { wanted_bytes: self.template_bytes, found_bytes: image.len() });
        }
        Ok(())
    }

    /// Writes checked values; ranges are joined from index `start` on.
    fn write_all(&self, values: &[u64], image: &mut [u8], start: usize, changed: &mut Vec<Range<u32>>) {
        for site in &self.sites {
            site.write(values[site.symbol as usize], image, &mut |range| push_range(changed, start, range));
        }
    }

    /// What has to be rewritten in an image of `old` (which was resolved on `old_template`) to make it one of this
    /// table, which was resolved on `new_template`. Both sections have the same size.
    pub fn rebind_from(&self, old: &Self, old_template: &[u8], new_template: &[u8]) -> Result<Rebind, RelocError> {
        let wanted_bytes = self.template_bytes;
        for found_bytes in [old.template_bytes, old_template.len(), new_template.len()] {
            if found_bytes != wanted_bytes {
                return Err(RelocError::ImageSize { wanted_bytes, found_bytes });
            }
        }
        if !wanted_bytes.is_multiple_of(4) {
            return Err(RelocError::RaggedSection { section_bytes: wanted_bytes });
        }
        let mut words = Vec::new();
        let (mut old_written, mut new_written) = (old.written.as_slice(), self.written.as_slice());
        let lines = old_template.chunks(LINE_BYTES).zip(new_template.chunks(LINE_BYTES));
        for (number, (old_line, new_line)) in lines.enumerate() {
            let start = (number * LINE_BYTES) as u32;
            let old_masks = take_below(&mut old_written, start + LINE_BYTES as u32);
            let new_masks = take_below(&mut new_written, start + LINE_BYTES as u32);
            // So are most lines, and then there is nothing to rewrite.
            if old_line == new_line && old_masks == new_masks {
                continue;
            }
            let pairs = old_line.as_chunks().0.iter().zip(new_line.as_chunks().0);
            for (at, (before, bits)) in (start..).step_by(4).zip(pairs) {
                let mask_of =
                    |masks: &[(u32, u32)]| masks.iter().find(|(word, _)| *word == at).map_or(0, |(_, mask)| *mask);
                let (before, bits) = (u32::from_le_bytes(*before), u32::from_le_bytes(*bits));
                let (old_mask, keep) = (mask_of(old_masks), mask_of(new_masks));
                if (before ^ bits | old_mask) & !keep != 0 {
                    words.push(RebindWord { at, bits, keep });
                }
            }
        }
        let mut old_sites = old.sites.iter().peekable();
        let is_moved = |site: &Site| {
            while old_sites.next_if(|other| other.at < site.at).is_some() {}
            // Two sites at one place write different bits of it.
            !old_sites.clone().take_while(|other| other.at == site.at).any(|other| other == site)
        };
        let moved: Vec<bool> = self.sites.iter().map(is_moved).collect();
        let moved_sites = (0..).zip(moved).filter(|(_, is_moved)| *is_moved).map(|(index, _)| index).collect();
        Ok(Rebind { template_bytes: wanted_bytes, words, moved_sites })
    }

    /// Rewrites an image of another program, to which `rebind` belongs, and inserts `values`; see
    /// [`apply`](Self::apply).
    pub fn rebind(
        &self,
        rebind: &Rebind,
        values: &[u64],
        image: &mut [u8],
        changed: &mut Vec<Range<u32>>,
    ) -> Result<(), RelocError> {
        self.check_rebind(rebind)?;
        self.check_all(values, image)?;
        let start = changed.len();
        rebind.write_words(image, start, changed);
        self.write_all(values, image, start, changed);
        Ok(())
    }

    /// As [`rebind`](Self::rebind), for an image into which the same `values` were inserted before: only what the two programs
    /// do not share is visited.
    pub fn rebind_same_values(
        &self,
        rebind: &Rebind,
        values: &[u64],
        image: &mut [u8],
        changed: &mut Vec<Range<u32>>,
    ) -> Result<(), RelocError> {
        self.check_rebind(rebind)?;
        self.check_sizes(values, image)?;
        let moved = || rebind.moved_sites.iter().filter_map(|index| self.sites.get(*index as usize));
        for site in moved() {
            self.check(site, values[site.symbol as usize])?;
        }
        let start = changed.len();
        rebind.write_words(image, start, changed);
        for site in moved() {
            site.write(values[site.symbol as usize], image, &mut |range| push_range(changed, start, range));
        }
        Ok(())
    }

    fn check_rebind(&self, rebind: &Rebind) -> Result<(), RelocError> {
        if rebind.template_bytes == self.template_bytes {
            return Ok(());
        }
        Err(RelocError::ImageSize { wanted_bytes: self.template_bytes, found_bytes: rebind.template_bytes })
    }

    /// The section with `values` inserted.
    pub fn patched(&self, template: &[u8], values: &[u64]) -> Result<Vec<u8>, RelocError> {
        let mut image = template.to_vec();
        self.apply(values, &mut image, &mut Vec::new())?;
        Ok(image)
    }

    /// Refuses a value that the site cannot hold.
    fn check(&self, site: &Site, value: u64) -> Result<(), RelocError> {
        let Some(bits) = site.schema.address_bits() else { return Ok(()) };
        let symbol = || self.symbols[site.symbol as usize].name.clone();
        if !value.is_multiple_of(4) {
            return Err(RelocError::Unaligned { symbol: symbol(), at_bytes: site.at, what: "address", value });
        }
        let address = u128::from(site.base) + u128::from(value);
        match address >> bits {
            0 => Ok(()),
            _ => Err(RelocError::TooLarge { symbol: symbol(), at_bytes: site.at, address, bits }),
        }
    }
}

impl Site {
    /// Merges a checked value into the image.
    fn write(&self, value: u64, image: &mut [u8], changed: &mut impl FnMut(Range<u32>)) {
        let sum = self.base.wrapping_add(value);
        let (low, high) = (sum as u32, (sum >> 32) as u32);
        let mut merge = |word: u32, bits: u32, mask: u32| merge_word(image, self.at + 4 * word, bits, mask, changed);
        match self.schema {
            Schema::Scalar32 => merge(0, value as u32, self.mask),
            Schema::Address64 => {
                merge(0, value as u32, u32::MAX);
                merge(1, (value >> 32) as u32, u32::MAX);
            }
            Schema::ShimDma48 => {
                merge(1, low & !3, u32::MAX);
                merge(2, high, 0xFFFF);
            }
            Schema::ControlPacket48 => {
                merge(2, low & !3, u32::MAX);
                merge(3, high, 0xFFFF);
            }
            Schema::ShimDma57 => {
                merge(1, low & !3, u32::MAX);
                merge(2, high, 0xFFFF);
                merge(8, high >> 16, 0x1FF);
            }
        }
    }
}

/// Takes the words below byte `end` from the front of `written`.
fn take_below<'w>(written: &mut &'w [(u32, u32)], end: u32) -> &'w [(u32, u32)] {
    let count = written.iter().take_while(|(at, _)| *at < end).count();
    let (below, rest) = written.split_at(count);
    *written = rest;
    below
}

/// Replaces the bits of `mask` in the word at byte `at`, and reports it if that changes the word.
fn merge_word(image: &mut [u8], at: u32, bits: u32, mask: u32, changed: &mut impl FnMut(Range<u32>)) {
    let Some(chunk) = image.get_mut(at as usize..at as usize + 4) else { return };
    let old = u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
    let new = old & !mask | bits & mask;
    if new != old {
        chunk.copy_from_slice(&new.to_le_bytes());
        changed(at..at + 4);
    }
}

impl<'a> Resolver<'a> {
    fn new(template: &'a [u8]) -> Self {
        let template_bytes = template.len();
        let table = PatchTable { template_bytes, symbols: Vec::new(), sites: Vec::new(), written: Vec::new() };
        Self { template, table, by_name: HashMap::new(), last_symbol: 0, claims: Vec::new() }
    }

    fn add(&mut self, name: &str, schema: Schema, size: u32, at: u32, addend: u32) -> Result<(), RelocError> {
        let symbol = self.symbol(name, schema, size)?;
        let unaligned = |what, value: u32| RelocError::Unaligned {
            symbol: name.to_owned(),
            at_bytes: at,
            what,
            value: value.into(),
        };
        if !at.is_multiple_of(4) {
            return Err(unaligned("its place", at));
        }
        let (span_bytes, section_bytes) = (schema.span_bytes(), self.template.len());
        if (at as usize).checked_add(span_bytes).is_none_or(|end| end > section_bytes) {
            return Err(RelocError::OutOfSection { symbol: name.to_owned(), at_bytes: at, span_bytes, section_bytes });
        }
        if schema.address_bits().is_some() && !addend.is_multiple_of(4) {
            return Err(unaligned("its addend", addend));
        }
        let mask = if schema == Schema::Scalar32 { size } else { 0 };
        self.claim(symbol, schema, mask, at);
        let base = self.template_address(schema, at) + u64::from(addend) + aperture(schema);
        self.table.sites.push(Site { at, symbol, schema, mask, base });
        Ok(())
    }

    /// Index of a name, which keeps one schema within the section.
    fn symbol(&mut self, name: &str, schema: Schema, size: u32) -> Result<u32, RelocError> {
        let is_last = self.table.symbols.get(self.last_symbol).is_some_and(|symbol| symbol.name == name);
        let known = if is_last { Some(self.last_symbol as u32) } else { self.by_name.get(name).copied() };
        let Some(index) = known else {
            let index = self.table.symbols.len() as u32;
            self.by_name.insert(name.to_owned(), index);
            self.table.symbols.push(PatchSymbol { name: name.to_owned(), schema, size });
            self.last_symbol = index as usize;
            return Ok(index);
        };
        self.last_symbol = index as usize;
        let symbol = &mut self.table.symbols[index as usize];
        if symbol.schema != schema {
            return Err(RelocError::MixedSchemas {
                symbol: name.to_owned(),
                first: symbol.schema.name(),
                second: schema.name(),
            });
        }
        symbol.size = symbol.size.max(size);
        Ok(index)
    }

    /// Notes the bits a site writes.
    fn claim(&mut self, symbol: u32, schema: Schema, mask: u32, at: u32) {
        for &(word, bits) in schema.written_words() {
            let bits = if schema == Schema::Scalar32 { mask } else { bits };
            self.claims.push(Claim { word_at: at + 4 * word, bits, symbol });
        }
    }

    /// Address that the template holds at a place.
    fn template_address(&self, schema: Schema, at: u32) -> u64 {
        let word = |i: usize| u64::from(u32_at(self.template, at as usize + 4 * i).unwrap_or_default());
        match schema {
            Schema::ShimDma48 => (word(2) & 0xFFFF) << 32 | word(1),
            Schema::ControlPacket48 => (word(3) & 0x0FFF) << 32 | word(2),
            Schema::ShimDma57 => (word(8) & 0x1FF) << 48 | (word(2) & 0xFFFF) << 32 | word(1),
            Schema::Scalar32 | Schema::Address64 => 0,
        }
    }

    /// The table, unless two sites write the same bits.
    fn finish(mut self) -> Result<PatchTable, RelocError> {
        self.table.sites.sort_by_key(|site| site.at);
        // Claims of one word stay in the order of their sites.
        self.claims.sort_by_key(|claim| claim.word_at);
        let written = &mut self.table.written;
        let mut first = 0;
        for Claim { word_at, bits, symbol } in self.claims {
            match written.last_mut() {
                Some((at, taken)) if *at == word_at => {
                    if *taken & bits != 0 {
                        let name = |index: u32| self.table.symbols[index as usize].name.clone();
                        return Err(RelocError::Overlap {
                            first: name(first),
                            second: name(symbol),
                            at_bytes: word_at,
                        });
                    }
                    *taken |= bits;
                }
                _ => {
                    first = symbol;
                    written.push((word_at, bits));
                }
            }
        }
        Ok(self.table)
    }
}

/// Where the array sees host memory, for the schemas that need it added.
fn aperture(schema: Schema) -> u64 {
    match schema {
        Schema::ShimDma48 | Schema::ControlPacket48 => HOST_APERTURE,
        Schema::ShimDma57 | Schema::Scalar32 | Schema::Address64 => 0,
    }
}

/// Appends a range to the ascending, disjoint ranges from index `start` on, joining it with the last one if they touch
/// or if it lies just before words that a wider place already reported.
fn push_range(ranges: &mut Vec<Range<u32>>, start: usize, range: Range<u32>) {
    // Places may interleave by a few words, so the position is searched from the end.
    let mut position = ranges.len();
    while position > start && ranges[position - 1].start > range.start {
        position -= 1;
    }
    if position > start && ranges[position - 1].end >= range.start {
        let last = &mut ranges[position - 1];
        last.end = last.end.max(range.end);
        position -= 1;
    } else {
        ranges.insert(position, range);
    }
    if position + 1 < ranges.len() && ranges[position].end >= ranges[position + 1].start {
        let next = ranges.remove(position + 1);
        ranges[position].end = ranges[position].end.max(next.end);
    }
}
