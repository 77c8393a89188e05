//! Building streams.

use super::{DdrPatch, DdrPatchForm, Header, Masked, Op, OpKind, Stream, TxnError, encode};
use crate::format::registers::{Address, Direction, QueuePush, Register, RegisterError, ShimBd, TileKind, TokenWait};

/// Builds a stream operation by operation.
///
/// ```
/// use npuhal_amdxdna::format::registers::{Direction, QueuePush, ShimBd, TokenWait};
/// use npuhal_amdxdna::format::txn::{Builder, DEV_GEN_AIE2, Header, Stream, Version};
///
/// let mut code = Builder::new(Header::new(Version::Wide, DEV_GEN_AIE2, 4));
/// code.shim_bd(0, 3, &ShimBd { length_words: 256, valid: true, ..ShimBd::default() })?;
/// code.patch_shim_bd(0, 3, 0, 0)?;
/// code.push_shim_task(0, Direction::S2mm, 0, QueuePush { start_bd: 3, repeat: 1, issue_token: true })?;
/// code.wait(TokenWait { direction: Direction::S2mm, row: 0, column: 0, row_count: 1, column_count: 1, channel: 0 });
/// let bytes = code.encode()?;
/// assert_eq!(Stream::parse(&bytes)?.ops.len(), 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Builder {
    stream: Stream,
}

impl Builder {
    /// An empty stream.
    pub fn new(header: Header) -> Self {
        Self { stream: Stream { header, ops: Vec::new() } }
    }

    /// Appends any operation, with informative bytes as the usual emitters leave them (zero).
    pub fn op(&mut self, kind: OpKind<'static>) -> &mut Self {
        self.stream.ops.push(Op::from(kind));
        self
    }

    /// Stores a word.
    pub fn write(&mut self, address: Address, value: u32) -> &mut Self {
        self.op(OpKind::Write { register: address.to_word(), value })
    }

    /// Stores consecutive words; at least one.
    pub fn block_write(&mut self, address: Address, data: Vec<u32>) -> &mut Self {
        self.op(OpKind::BlockWrite { register: address.to_word(), data: data.into() })
    }

    /// Replaces the bits of `mask`.
    pub fn mask_write(&mut self, address: Address, value: u32, mask: u32) -> &mut Self {
        self.op(OpKind::MaskWrite(Masked { register: address.to_word(), value, mask, tail: None }))
    }

    /// Waits until the bits of `mask` have `value`.
    pub fn mask_poll(&mut self, address: Address, value: u32, mask: u32) -> &mut Self {
        self.op(OpKind::MaskPoll(Masked { register: address.to_word(), value, mask, tail: None }))
    }

    /// Writes shim buffer descriptor `bd` of `column`.
    pub fn shim_bd(&mut self, column: u8, bd: u8, descriptor: &ShimBd) -> Result<&mut Self, RegisterError> {
        let address = Register::Bd { bd, word: 0 }.at(column, 0)?;
        Ok(self.block_write(address, descriptor.encode()?.to_vec()))
    }

    /// Adds the address of run argument `argument` plus `offset_bytes` to shim buffer descriptor `bd` of `column`.
    pub fn patch_shim_bd(
        &mut self,
        column: u8,
        bd: u8,
        argument: u32,
        offset_bytes: u64,
    ) -> Result<&mut Self, RegisterError> {
        let register = Register::Bd { bd, word: 1 }.at(column, 0)?.to_word();
        let form = DdrPatchForm::of(self.stream.header.version);
        Ok(self.op(OpKind::DdrPatch(DdrPatch { register, argument, offset: offset_bytes, form })))
    }

    /// Pushes a task into the queue of a shim channel of `column`.
    pub fn push_shim_task(
        &mut self,
        column: u8,
        direction: Direction,
        channel: u8,
        push: QueuePush,
    ) -> Result<&mut Self, RegisterError> {
        let address = Register::TaskQueue(direction, channel).at(column, 0)?;
        Ok(self.write(address, push.encode(TileKind::Shim)?))
    }

    /// Waits for task-complete tokens.
    pub fn wait(&mut self, wait: TokenWait) -> &mut Self {
        let (word, config) = wait.encode();
        self.op(OpKind::Tct { word, config })
    }

    /// Loads the partition image `id`; the host patches its address in.
    pub fn load_pdi(&mut self, id: u16, size_bytes: u32) -> &mut Self {
        self.op(OpKind::LoadPdi { id, size_bytes, address: 0 })
    }

    /// The stream so far.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The finished stream.
    pub fn into_stream(self) -> Stream {
        self.stream
    }

    /// The stream's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, TxnError> {
        self.stream.encode()
    }
}

impl Stream {
    /// Byte offset of every operation in the encoded stream, and of the stream's end.
    pub fn op_offsets(&self) -> Vec<usize> {
        let mut at = super::HEADER_BYTES;
        let mut offsets = Vec::with_capacity(self.ops.len() + 1);
        for op in &self.ops {
            offsets.push(at);
            at += encode::op_len_bytes(&op.kind, self.header.version);
        }
        offsets.push(at);
        offsets
    }
}
