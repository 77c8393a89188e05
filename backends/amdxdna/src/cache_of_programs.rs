//! Parsed programs, kept on the host by the bytes they came from.

use crate::program::KernelProgram;
use npuhal_core::DeviceError;
use std::sync::{Arc, Mutex, PoisonError};

/// Most host memory that the cache takes.
pub(crate) const MAX_BYTES: u64 = 24 << 20;

/// Parsed programs of one device, the one used longest ago dropped first.
#[derive(Debug)]
pub(crate) struct ProgramCache {
    max_bytes: u64,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    list: Vec<Entry>,
    bytes: u64,
    clock: u64,
}

#[derive(Debug)]
struct Entry {
    hash: u64,
    image: Box<[u8]>,
    kernel: String,
    program: Arc<KernelProgram>,
    bytes: u64,
    used: u64,
}

impl ProgramCache {
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { max_bytes, entries: Mutex::default() }
    }

    /// Host memory that the cache takes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// The program of `kernel` in `image`, parsed by `parse` where it is not known.
    pub(crate) fn get_or_insert(
        &self,
        image: &[u8],
        kernel: &str,
        parse: impl FnOnce() -> Result<KernelProgram, DeviceError>,
    ) -> Result<Arc<KernelProgram>, DeviceError> {
        let hash = hash(image) ^ hash(kernel.as_bytes()).rotate_left(1);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.clock += 1;
        let now = entries.clock;
        let is_it = |entry: &&mut Entry| entry.hash == hash && entry.kernel == kernel && *entry.image == *image;
        if let Some(entry) = entries.list.iter_mut().find(is_it) {
            entry.used = now;
            return Ok(Arc::clone(&entry.program));
        }
        let program = Arc::new(parse()?);
        let bytes = image.len() as u64 + kernel.len() as u64 + program.host_bytes();
        if bytes <= self.max_bytes {
            entries.make_room(self.max_bytes - bytes);
            entries.bytes += bytes;
            let (image, kernel) = (image.into(), kernel.to_owned());
            entries.list.push(Entry { hash, image, kernel, program: Arc::clone(&program), bytes, used: now });
        }
        Ok(program)
    }
}

impl Entries {
    fn make_room(&mut self, max_bytes: u64) {
        while self.bytes > max_bytes {
            let oldest = self.list.iter().enumerate().min_by_key(|(_, entry)| entry.used).map(|(index, _)| index);
            let Some(index) = oldest else { return };
            self.bytes -= self.list.swap_remove(index).bytes;
        }
    }
}

/// A number by which files are told apart quickly; those that share one are compared.
fn hash(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let (chunks, rest) = bytes.as_chunks::<32>();
    // Four chains side by side: each is slower than memory.
    let mut chains = [1, 2, 3, bytes.len() as u64];
    for chunk in chunks {
        for (chain, word) in chains.iter_mut().zip(chunk.as_chunks().0) {
            *chain = (*chain ^ u64::from_le_bytes(*word)).wrapping_mul(FACTOR).rotate_left(29);
        }
    }
    let mut last = [0; 32];
    last[..rest.len()].copy_from_slice(rest);
    let last = last.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    chains.into_iter().chain(last).fold(0, |sum, word| (sum ^ word).wrapping_mul(FACTOR).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::ProgramCache;
    use crate::packet::Opcode;
    use crate::program::{KernelProgram, Launch};

    fn program(name: &str) -> KernelProgram {
        KernelProgram {
            name: name.to_owned(),
            signature: Vec::new(),
            allows_fewer_args: false,
            launch: Launch::FullElf { opcode: Opcode::StartNpu },
            sections: Vec::new(),
            pdis: vec![vec![0; 100].into()],
        }
    }

    #[test]
    fn what_is_known_is_not_parsed_again_and_the_size_is_bounded() {
        let cache = ProgramCache::new(1000);
        let get = |image: &[u8], kernel: &str| cache.get_or_insert(image, kernel, || Ok(program(kernel))).unwrap();
        let first = get(&[1; 300], "a");
        let again = cache.get_or_insert(&[1; 300], "a", || unreachable!("it is known")).unwrap();
        assert!(std::sync::Arc::ptr_eq(&first, &again));
        assert_eq!(get(&[1; 300], "b").name, "b");
        assert_eq!(cache.len_bytes(), 802);
        get(&[1; 300], "a");
        get(&[2; 300], "c");
        assert_eq!(cache.len_bytes(), 802);
        let again = cache.get_or_insert(&[1; 300], "a", || unreachable!("it was used lately")).unwrap();
        assert_eq!(again.name, "a");
        get(&[3; 2000], "too large");
        assert_eq!(cache.len_bytes(), 802);
    }
}
