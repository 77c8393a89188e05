//! Frames of the socket between the processes: length in bytes as little-endian u32, then JSON.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Bytes of a frame at most. A body of the largest size that can be configured, with every character escaped, stays below.
pub const MAX_FRAME_BYTES: u32 = 512 << 20;

/// Larger frames grow with what really arrives.
const USUAL_FRAME_BYTES: usize = 16 << 10;

fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = Vec::new();
    append(&mut frame, message)?;
    Ok(frame)
}

/// Puts one message behind those in `frames`, which may then be written together.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for a message above [`MAX_FRAME_BYTES`]; `frames` is as before.
pub(crate) fn append<T: Serialize>(frames: &mut Vec<u8>, message: &T) -> io::Result<()> {
    let start = frames.len();
    frames.extend_from_slice(&[0; 4]);
    let written = serde_json::to_writer(&mut *frames, message).map_err(io::Error::from).and_then(|()| {
        let bytes = frames.len() - start - 4;
        let length = u32::try_from(bytes).ok().filter(|&length| length <= MAX_FRAME_BYTES);
        length.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("a message of {bytes} bytes between processes"))
        })
    });
    match written {
        Ok(length) => {
            frames[start..start + 4].copy_from_slice(&length.to_le_bytes());
            Ok(())
        }
        Err(error) => {
            frames.truncate(start);
            Err(error)
        }
    }
}

fn checked_length(prefix: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_le_bytes(prefix);
    if length > MAX_FRAME_BYTES {
        let what = format!("a frame of {length} bytes; at most {MAX_FRAME_BYTES} are sent");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(length as usize)
}

/// Writes one message.
///
/// # Errors
/// As the writer; [`io::ErrorKind::InvalidData`] for one above [`MAX_FRAME_BYTES`].
pub fn write<T: Serialize>(writer: &mut (impl Write + ?Sized), message: &T) -> io::Result<()> {
    writer.write_all(&encode(message)?)?;
    writer.flush()
}

/// Reads one message; `None` at the end of the stream.
///
/// # Errors
/// As the reader; [`io::ErrorKind::InvalidData`] for what is no message.
pub fn read<T: DeserializeOwned>(reader: &mut impl Read) -> io::Result<Option<T>> {
    let mut prefix = [0; 4];
    match reader.read_exact(&mut prefix) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = checked_length(prefix)?;
    // Grows with what really arrives.
    let mut body = Vec::new();
    if reader.take(length as u64).read_to_end(&mut body)? != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(serde_json::from_slice(&body)?))
}

/// As [`write`].
///
/// # Errors
/// As [`write`].
pub(crate) async fn send<T: Serialize>(writer: &mut (impl AsyncWrite + Unpin), message: &T) -> io::Result<()> {
    writer.write_all(&encode(message)?).await?;
    writer.flush().await
}

/// As [`read`].
///
/// # Errors
/// As [`read`].
pub(crate) async fn receive<T: DeserializeOwned>(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<T>> {
    let mut prefix = [0; 4];
    match reader.read_exact(&mut prefix).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = checked_length(prefix)?;
    let mut body = Vec::with_capacity(length.min(USUAL_FRAME_BYTES));
    if reader.take(length as u64).read_to_end(&mut body).await? != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(serde_json::from_slice(&body)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Order;

    #[test]
    fn frames_come_back_and_the_end_is_told() {
        let mut bytes = Vec::new();
        write(&mut bytes, &Order::Ping { number: 7 }).unwrap();
        write(&mut bytes, &Order::Quit).unwrap();
        let mut reader = bytes.as_slice();
        assert_eq!(read::<Order>(&mut reader).unwrap(), Some(Order::Ping { number: 7 }));
        assert_eq!(read::<Order>(&mut reader).unwrap(), Some(Order::Quit));
        assert_eq!(read::<Order>(&mut reader).unwrap(), None);
    }

    #[test]
    fn several_frames_go_together_and_a_bad_one_leaves_nothing() {
        /// Cannot be written.
        struct Bad;
        impl Serialize for Bad {
            fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
                Err(serde::ser::Error::custom("bad"))
            }
        }
        let mut frames = Vec::new();
        append(&mut frames, &Order::Ping { number: 7 }).unwrap();
        let before = frames.clone();
        append(&mut frames, &(Order::Quit, Bad)).unwrap_err();
        assert_eq!(frames, before);
        append(&mut frames, &Order::Quit).unwrap();
        let mut reader = frames.as_slice();
        assert_eq!(read::<Order>(&mut reader).unwrap(), Some(Order::Ping { number: 7 }));
        assert_eq!(read::<Order>(&mut reader).unwrap(), Some(Order::Quit));
        assert_eq!(read::<Order>(&mut reader).unwrap(), None);
    }

    #[test]
    fn a_claim_of_gigabytes_allocates_nothing() {
        let claim = u32::MAX.to_le_bytes();
        assert_eq!(read::<Order>(&mut claim.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let cut = [200_u8, 0, 0, 0, b'{'];
        assert_eq!(read::<Order>(&mut cut.as_slice()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
