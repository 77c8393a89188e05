//! Streams between shim and cores, and the memories of the tiles behind the shim.

use super::program::StreamKey;
use std::collections::HashMap;

/// What a core program reads from and writes to.
pub(super) trait StreamSet {
    fn read(&mut self, input: StreamKey, dst: &mut [u8]) -> bool;
    fn write(&mut self, output: StreamKey, src: &[u8]) -> bool;
    fn has_room(&self, output: StreamKey, len_bytes: usize) -> bool;
    fn is_wanted(&self, output: StreamKey) -> bool;
}

/// Bytes in flight in one stream.
#[derive(Debug, Default)]
pub(super) struct Fifo {
    bytes: Vec<u8>,
    head: usize,
}

impl Fifo {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.head
    }

    pub(super) fn push(&mut self, src: &[u8]) {
        self.bytes.extend_from_slice(src);
    }

    /// Takes up to `len` bytes from the front.
    pub(super) fn front(&self, len: usize) -> &[u8] {
        &self.bytes[self.head..self.bytes.len().min(self.head + len)]
    }

    pub(super) fn advance(&mut self, len: usize) {
        self.head = (self.head + len).min(self.bytes.len());
        if self.head == self.bytes.len() {
            self.bytes.clear();
            self.head = 0;
        } else if self.head > 1 << 20 {
            self.bytes.drain(..self.head);
            self.head = 0;
        }
    }
}

const PAGE_WORDS: u32 = 256;

/// Words of registers and memories of all tiles of a partition, by address.
#[derive(Debug, Default)]
pub(super) struct TileMemory {
    pages: HashMap<(u8, u8, u32), Box<[u32; PAGE_WORDS as usize]>>,
}

impl TileMemory {
    pub(super) fn load(&self, column: u8, row: u8, offset: u32) -> u32 {
        let (page, word) = place(offset);
        self.pages.get(&(column, row, page)).map_or(0, |words| words[word])
    }

    pub(super) fn store(&mut self, column: u8, row: u8, offset: u32, value: u32) {
        let (page, word) = place(offset);
        self.pages.entry((column, row, page)).or_insert_with(|| Box::new([0; PAGE_WORDS as usize]))[word] = value;
    }
}

fn place(offset: u32) -> (u32, usize) {
    let word = offset / 4;
    (word / PAGE_WORDS, (word % PAGE_WORDS) as usize)
}
