//! A file of a model hub's repository, over HTTP, continued by `Range`.

use super::error::SourceError;
use super::http::{self, Event, Failure, Head};
use super::{Job, Phase, Stop, TICK};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How GGUF files begin (GGUF specification).
const MAGIC: &[u8] = b"GGUF";
/// New bytes that count as progress: fewer do not buy further attempts.
const PROGRESS_BYTES: u64 = 64 << 10;
/// Longest pause between attempts.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(8);
/// Bytes of a wrong answer that are shown.
const EXCERPT_BYTES: usize = 60;

/// How an attempt ended early.
enum Broken {
    /// Another attempt may do better, after the stated time if the server stated one.
    Lost { reason: String, connected: bool, retry_after: Option<Duration>, status: Option<u16> },
    /// No attempt will do better.
    Stop(Stop),
}

impl<T: Into<Stop>> From<T> for Broken {
    fn from(stop: T) -> Self {
        Self::Stop(stop.into())
    }
}

/// Completes the job's file from `{endpoint}/{repository}/resolve/{revision}/{file}`.
pub(super) fn fetch(job: &mut Job<'_>, repository: &str, revision: &str, file: &str) -> Result<(), Stop> {
    job.require_space(0)?;
    let url = format!("{}/{repository}/resolve/{revision}/{file}", job.options.endpoint);
    let mut reached = job.partial.len();
    let mut attempts = 0;
    let mut was_connected = false;
    loop {
        let broken = attempt(job, &url);
        if job.partial.is_complete() {
            return Ok(());
        }
        let (reason, retry_after, status) = match broken {
            Ok(()) => ("the server sent only a part".to_owned(), None, None),
            Err(Broken::Stop(stop)) => return Err(stop),
            Err(Broken::Lost { reason, connected: false, .. }) if !was_connected => {
                return Err(SourceError::Unreachable { url, reason }.into());
            }
            Err(Broken::Lost { reason, retry_after, status, .. }) => (reason, retry_after, status),
        };
        was_connected = true;
        if job.partial.len() >= reached + PROGRESS_BYTES {
            reached = job.partial.len();
            attempts = 0;
        }
        attempts += 1;
        if attempts >= job.options.attempts {
            if let Some(status) = status {
                return Err(SourceError::Status { url, status }.into());
            }
            let (got_bytes, size_bytes) = (job.partial.len(), job.partial.size_bytes());
            return Err(SourceError::Interrupted { url, got_bytes, size_bytes, attempts, reason }.into());
        }
        tracing::debug!("{url}: {reason}; attempt {} follows", attempts + 1);
        job.pause(retry_after.unwrap_or_else(|| delay(job.options.retry_delay, attempts)))?;
    }
}

fn delay(first: Duration, attempts: u32) -> Duration {
    first.saturating_mul(1 << (attempts - 1).min(8)).min(MAX_RETRY_DELAY.max(first))
}

/// One request; appends what it brings.
fn attempt(job: &mut Job<'_>, url: &str) -> Result<(), Broken> {
    let start = job.partial.len();
    job.report(Phase::Connecting, start);
    let events = http::get(url, start, job.options);
    // Several hosts may have to be found and connected to on the way to the first byte.
    let head = match next(job, &events, 2 * job.options.connect_timeout + job.options.stall_timeout)? {
        Event::Head(head) => head,
        Event::Failed(failure) => return Err(broken(url, failure)),
        Event::Chunk(_) | Event::End => return Err(lost("no response")),
    };
    // Bytes of the body that are there already: all servers may ignore a range.
    let mut surplus = match first_byte(job, url, &head, start)? {
        Some(first) => start - first,
        None => return Err(lost("the server refused to continue, so it has to start over")),
    };
    let mut beginning = Vec::new();
    loop {
        let chunk = match next(job, &events, job.options.stall_timeout)? {
            Event::Chunk(chunk) => chunk,
            Event::End if beginning.is_empty() => break,
            Event::End => return Err(not_gguf(url, &beginning)),
            Event::Failed(failure) => return Err(broken(url, failure)),
            Event::Head(_) => return Err(lost("a second response")),
        };
        let skip = usize::try_from(surplus).unwrap_or(usize::MAX).min(chunk.len());
        surplus -= skip as u64;
        let mut chunk = &chunk[skip..];
        if job.partial.len() == 0 {
            beginning.extend_from_slice(chunk);
            if beginning.len() < MAGIC.len() {
                continue;
            }
            if !beginning.starts_with(MAGIC) {
                return Err(not_gguf(url, &beginning));
            }
            chunk = &beginning;
        }
        job.append(chunk, &|| url.to_owned())?;
        beginning.clear();
        let done_bytes = job.partial.len();
        job.report(Phase::Downloading, done_bytes);
    }
    if job.partial.is_complete() { Ok(()) } else { Err(lost("the connection was closed early")) }
}

/// Waits for the next event, but not longer than `patience`, and not when the caller stops the download.
fn next(job: &Job<'_>, events: &Receiver<Event>, patience: Duration) -> Result<Event, Broken> {
    let end = Instant::now() + patience;
    loop {
        job.check()?;
        match events.recv_timeout(TICK) {
            Ok(event) => return Ok(event),
            Err(RecvTimeoutError::Disconnected) => return Err(lost("the request ended")),
            Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
            Err(RecvTimeoutError::Timeout) => {
                return Err(lost(&format!("no byte came for {} s", patience.as_secs_f32())));
            }
        }
    }
}

/// Checks a response's head; the offset of the body's first byte in the file, or nothing where the request for the rest was
/// refused and the file was emptied.
fn first_byte(job: &mut Job<'_>, url: &str, head: &Head, start: u64) -> Result<Option<u64>, Broken> {
    let size_bytes = job.partial.size_bytes();
    let range = head.content_range.as_deref().and_then(ContentRange::parse);
    match head.status {
        200 | 206 => {}
        416 if start > 0 => {
            if let Some(total) = range.and_then(|range| range.total).filter(|total| *total != size_bytes) {
                return Err(wrong_size(url, size_bytes, total));
            }
            job.partial.start_over()?;
            return Ok(None);
        }
        status @ (408 | 425 | 429 | 500..=599) => {
            let reason = format!("the server answered {status}");
            return Err(Broken::Lost { reason, connected: true, retry_after: head.retry_after, status: Some(status) });
        }
        status => return Err(SourceError::Status { url: url.to_owned(), status }.into()),
    }
    check_content(job, url, head)?;
    if head.status == 206 {
        return check_range(url, head, range, start, size_bytes).map(Some);
    }
    match head.content_length {
        Some(length) if length != size_bytes => Err(wrong_size(url, size_bytes, length)),
        _ => Ok(Some(0)),
    }
}

/// Refuses content that is not the file, as far as the head tells.
fn check_content(job: &Job<'_>, url: &str, head: &Head) -> Result<(), Broken> {
    let size_bytes = job.partial.size_bytes();
    if let Some(kind) = head.content_type.as_deref().filter(|kind| kind.to_ascii_lowercase().starts_with("text/html")) {
        return Err(not_the_file(url, "a GGUF file".to_owned(), format!("a web page (Content-Type: {kind})")));
    }
    if let Some(encoding) =
        head.content_encoding.as_deref().filter(|encoding| !encoding.eq_ignore_ascii_case("identity"))
    {
        return Err(breach(url, "the file as it is".to_owned(), format!("Content-Encoding: {encoding}")));
    }
    if let Some(size) = head.linked_size.filter(|size| *size != size_bytes) {
        return Err(wrong_size(url, size_bytes, size));
    }
    let wanted = job.sha256.to_string();
    match head.linked_etag.as_deref().and_then(sha256_of_etag) {
        Some(found) if found != wanted => {
            Err(not_the_file(url, format!("SHA-256 {wanted}"), format!("a file with SHA-256 {found}")))
        }
        _ => Ok(()),
    }
}

/// Checks the range of a 206 response; the offset of its first byte.
fn check_range(
    url: &str,
    head: &Head,
    range: Option<ContentRange>,
    start: u64,
    size_bytes: u64,
) -> Result<u64, Broken> {
    let wanted = || format!("bytes from {start} on");
    let Some(ContentRange { bytes: Some((first, last)), total }) = range else {
        let found = head.content_range.as_deref().map(|range| format!("Content-Range: {range}"));
        return Err(breach(url, wanted(), found.unwrap_or("206 without Content-Range".to_owned())));
    };
    if let Some(total) = total.filter(|total| *total != size_bytes) {
        return Err(wrong_size(url, size_bytes, total));
    }
    if first != start || !(first..size_bytes).contains(&last) {
        return Err(breach(url, wanted(), format!("bytes {first} to {last}")));
    }
    match head.content_length {
        Some(length) if length != last - first + 1 => {
            Err(breach(url, format!("bytes {first} to {last}"), format!("{length} bytes")))
        }
        _ => Ok(first),
    }
}

/// A `Content-Range` header (RFC 9110, section 14.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ContentRange {
    /// First and last byte; absent where no range could be satisfied.
    bytes: Option<(u64, u64)>,
    /// Bytes of the whole, if known.
    total: Option<u64>,
}

impl ContentRange {
    fn parse(header: &str) -> Option<Self> {
        let (range, total) = header.strip_prefix("bytes")?.trim_start().split_once('/')?;
        let total = if total == "*" { None } else { Some(total.parse().ok()?) };
        if range == "*" {
            return Some(Self { bytes: None, total });
        }
        let (first, last) = range.split_once('-')?;
        Some(Self { bytes: Some((first.parse().ok()?, last.parse().ok()?)), total })
    }
}

/// The checksum in an entity tag, which for files in the hub's large-file storage is their SHA-256.
fn sha256_of_etag(etag: &str) -> Option<String> {
    let tag = etag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
    (tag.len() == 64 && tag.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(tag)
}

fn not_gguf(url: &str, beginning: &[u8]) -> Broken {
    let excerpt = String::from_utf8_lossy(&beginning[..beginning.len().min(EXCERPT_BYTES)]);
    let excerpt: String = excerpt.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    not_the_file(url, "a GGUF file, which begins with `GGUF`".to_owned(), format!("`{}`", excerpt.trim()))
}

fn wrong_size(url: &str, wanted_bytes: u64, found_bytes: u64) -> Broken {
    not_the_file(url, format!("a file of {wanted_bytes} bytes"), format!("a file of {found_bytes} bytes"))
}

fn not_the_file(url: &str, wanted: String, found: String) -> Broken {
    SourceError::NotTheFile { place: url.to_owned(), wanted, found }.into()
}

fn breach(url: &str, wanted: String, found: String) -> Broken {
    SourceError::Protocol { url: url.to_owned(), wanted, found }.into()
}

fn broken(url: &str, failure: Failure) -> Broken {
    match failure {
        Failure::Unreachable(reason) => Broken::Lost { reason, connected: false, retry_after: None, status: None },
        Failure::Lost(reason) => lost(&reason),
        Failure::Redirect(reason) => SourceError::Redirect { url: url.to_owned(), reason }.into(),
    }
}

fn lost(reason: &str) -> Broken {
    Broken::Lost { reason: reason.to_owned(), connected: true, retry_after: None, status: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges_are_read() {
        let range = |bytes, total| Some(ContentRange { bytes, total });
        assert_eq!(ContentRange::parse("bytes 5-9/10"), range(Some((5, 9)), Some(10)));
        assert_eq!(ContentRange::parse("bytes 5-9/*"), range(Some((5, 9)), None));
        assert_eq!(ContentRange::parse("bytes */10"), range(None, Some(10)));
        for wrong in ["", "bytes", "bytes 5/10", "bytes 5-/10", "items 5-9/10", "bytes -5-9/10", "bytes 5-9/x"] {
            assert_eq!(ContentRange::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn pauses_double_up_to_a_limit() {
        let first = Duration::from_millis(500);
        assert_eq!(delay(first, 1), first);
        assert_eq!(delay(first, 3), 4 * first);
        assert_eq!(delay(first, 1000), MAX_RETRY_DELAY);
    }

    #[test]
    fn entity_tags_are_checksums_where_they_look_like_it() {
        let sum = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32";
        assert_eq!(sha256_of_etag(&format!("W/\"{sum}\"")).as_deref(), Some(sum));
        assert_eq!(sha256_of_etag("\"abc\""), None);
    }
}
