//! One HTTP request on a thread of its own, so that nobody waits for a silent server longer than he wants to.
//!
//! Redirects are followed here: the token stays with the endpoint's origin, an encrypted connection is not given up for an
//! open one, and what the hub says about the content along the way is kept.

use super::{PullOptions, Token};
use std::io::{ErrorKind, Read};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;
use ureq::http::header::{self, HeaderMap, HeaderName};
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, Proxy, ProxyProtocol, Timeout};

/// Bytes of one read.
const CHUNK_BYTES: usize = 64 << 10;
/// Chunks that may wait for the reader.
const CHUNKS_WAITING: usize = 16;
const MAX_REDIRECTS: u32 = 10;
/// Longest answer to a request to wait that is honoured.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(10);

/// What happens to a request, in order: a head, chunks, an end; or a failure at any point.
pub(super) enum Event {
    Head(Head),
    Chunk(Vec<u8>),
    End,
    Failed(Failure),
}

/// The part of a response before its body, and what redirects on the way to it said.
#[derive(Debug, Default)]
pub(super) struct Head {
    pub(super) status: u16,
    pub(super) content_length: Option<u64>,
    pub(super) content_range: Option<String>,
    pub(super) content_type: Option<String>,
    pub(super) content_encoding: Option<String>,
    pub(super) retry_after: Option<Duration>,
    /// Size of the content according to the hub (`X-Linked-Size`).
    pub(super) linked_size: Option<u64>,
    /// Checksum of the content according to the hub (`X-Linked-ETag`).
    pub(super) linked_etag: Option<String>,
}

/// Why there is no response, or no more of it.
#[derive(Debug)]
pub(super) enum Failure {
    /// No connection was made.
    Unreachable(String),
    /// A connection was made, and lost.
    Lost(String),
    /// A redirect that is not followed.
    Redirect(String),
}

/// Asks for the bytes of `url` from `start` on. Dropping the receiver ends the request at its next byte or time-out.
pub(super) fn get(url: &str, start: u64, options: &PullOptions) -> Receiver<Event> {
    let (sender, receiver) = sync_channel(CHUNKS_WAITING);
    let (url, options) = (url.to_owned(), options.clone());
    let failed = sender.clone();
    let spawned = thread::Builder::new().name("http".to_owned()).spawn(move || run(&url, start, &options, &sender));
    if let Err(error) = spawned {
        let _ = failed.send(Event::Failed(Failure::Unreachable(format!("no thread: {error}"))));
    }
    receiver
}

/// Sends the request and passes on what comes. A send fails when nobody listens any more, which ends the work.
fn run(url: &str, start: u64, options: &PullOptions, events: &SyncSender<Event>) {
    let (head, body) = match open(url, start, options) {
        Ok(opened) => opened,
        Err(failure) => {
            let _ = events.send(Event::Failed(failure));
            return;
        }
    };
    let is_success = (200..300).contains(&head.status);
    if events.send(Event::Head(head)).is_err() || !is_success {
        return;
    }
    let mut reader = body.into_with_config().limit(u64::MAX).reader();
    loop {
        let mut chunk = vec![0; CHUNK_BYTES];
        let event = match reader.read(&mut chunk) {
            Ok(0) => Event::End,
            Ok(len) => {
                chunk.truncate(len);
                Event::Chunk(chunk)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => Event::Failed(Failure::Lost(plain(&ureq::Error::from(error)))),
        };
        let is_last = !matches!(event, Event::Chunk(_));
        if events.send(event).is_err() || is_last {
            return;
        }
    }
}

fn open(url: &str, start: u64, options: &PullOptions) -> Result<(Head, Body), Failure> {
    let endpoint = parse(&options.endpoint).map_err(Failure::Unreachable)?;
    let mut uri = parse(url).map_err(Failure::Unreachable)?;
    let mut head = Head::default();
    for _ in 0..=MAX_REDIRECTS {
        let token = options.token.as_ref().filter(|_| origin(&uri) == origin(&endpoint));
        let response = send(&uri, start, token, options)?;
        head.note_content(response.headers());
        if !is_redirect(response.status()) {
            head.note(&response);
            return Ok((head, response.into_body()));
        }
        let target = text(response.headers(), header::LOCATION).unwrap_or_default();
        let next = join(&uri, &target).map_err(Failure::Redirect)?;
        if uri.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
            return Err(Failure::Redirect(format!("it leaves encryption for {next}")));
        }
        uri = next;
    }
    Err(Failure::Redirect(format!("more than {MAX_REDIRECTS} in a row")))
}

fn send(uri: &Uri, start: u64, token: Option<&Token>, options: &PullOptions) -> Result<Response<Body>, Failure> {
    let proxy = options.proxies.for_uri(uri).map(parse_proxy).transpose().map_err(Failure::Unreachable)?;
    let config = Agent::config_builder()
        .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
        .proxy(proxy)
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("npuhal/", env!("CARGO_PKG_VERSION")))
        .accept_encoding("identity")
        .timeout_resolve(Some(options.connect_timeout))
        .timeout_connect(Some(options.connect_timeout))
        .timeout_recv_response(Some(options.stall_timeout))
        .timeout_per_read(Some(options.stall_timeout))
        .build();
    let mut request = Agent::new_with_config(config).get(uri);
    if start > 0 {
        request = request.header(header::RANGE, format!("bytes={start}-"));
    }
    if let Some(Token(secret)) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {secret}"));
    }
    request.call().map_err(|error| {
        if is_unreachable(&error) { Failure::Unreachable(plain(&error)) } else { Failure::Lost(plain(&error)) }
    })
}

/// The proxy at `address`, which is not repeated in messages: it may hold a password.
fn parse_proxy(address: &str) -> Result<Proxy, String> {
    let proxy = Proxy::new(address).map_err(|_| "the proxy of the environment is not of the form http://HOST:PORT")?;
    match proxy.protocol() {
        ProxyProtocol::Http | ProxyProtocol::Https => Ok(proxy),
        other => Err(format!("the environment names a proxy of kind {other:?}; supported: http, https")),
    }
}

impl Head {
    fn note(&mut self, response: &Response<Body>) {
        let headers = response.headers();
        self.status = response.status().as_u16();
        self.content_length = number(headers, header::CONTENT_LENGTH);
        self.content_range = text(headers, header::CONTENT_RANGE);
        self.content_type = text(headers, header::CONTENT_TYPE);
        self.content_encoding = text(headers, header::CONTENT_ENCODING);
        let seconds = number(headers, header::RETRY_AFTER);
        self.retry_after = seconds.map(|seconds| Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    }

    fn note_content(&mut self, headers: &HeaderMap) {
        self.linked_size = self.linked_size.or(number(headers, HeaderName::from_static("x-linked-size")));
        self.linked_etag = self.linked_etag.take().or(text(headers, HeaderName::from_static("x-linked-etag")));
    }
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.trim().to_owned())
}

fn number(headers: &HeaderMap, name: HeaderName) -> Option<u64> {
    text(headers, name)?.parse().ok()
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

fn parse(url: &str) -> Result<Uri, String> {
    let uri: Uri = url.parse().map_err(|error| format!("`{url}` is no address: {error}"))?;
    let known = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty());
    if known { Ok(uri) } else { Err(format!("`{url}` is not of the form https://HOST (or http://)")) }
}

/// The address that `target` means in a redirect from `base` (RFC 3986, section 5.2, as far as paths without dots go).
fn join(base: &Uri, target: &str) -> Result<Uri, String> {
    let target = target.split('#').next().unwrap_or_default();
    let scheme = base.scheme_str().unwrap_or("https");
    let authority = base.authority().map(|authority| authority.as_str()).unwrap_or_default();
    if target.is_empty() {
        return Err("it names no address".to_owned());
    }
    let has_scheme = target.split_once("://").is_some_and(|(before, _)| !before.contains(['/', '?']));
    if has_scheme {
        return parse(target);
    }
    if let Some(rest) = target.strip_prefix("//") {
        return parse(&format!("{scheme}://{rest}"));
    }
    if target.starts_with('/') {
        return parse(&format!("{scheme}://{authority}{target}"));
    }
    let folder = base.path().rsplit_once('/').map_or("", |(folder, _)| folder);
    parse(&format!("{scheme}://{authority}{folder}/{target}"))
}

fn origin(uri: &Uri) -> (Option<&str>, Option<String>, Option<u16>) {
    let default_port = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    let host = uri.host().map(str::to_ascii_lowercase);
    (uri.scheme_str(), host, uri.port_u16().or(Some(default_port)))
}

fn is_unreachable(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Timeout(timeout) => matches!(timeout, Timeout::Resolve | Timeout::Connect),
        // An unknown host has no error kind of its own.
        ureq::Error::Io(error) => !matches!(
            error.kind(),
            ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
                | ErrorKind::TimedOut
                | ErrorKind::WouldBlock
        ),
        ureq::Error::HostNotFound
        | ureq::Error::ConnectionFailed
        | ureq::Error::ConnectProxyFailed(_)
        | ureq::Error::InvalidProxyUrl
        | ureq::Error::BadUri(_)
        | ureq::Error::Tls(_)
        | ureq::Error::Rustls(_)
        | ureq::Error::TlsRequired => true,
        _ => false,
    }
}

fn plain(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(Timeout::Resolve) => "looking up the host took too long".to_owned(),
        ureq::Error::Timeout(Timeout::Connect) => "connecting took too long".to_owned(),
        ureq::Error::Timeout(_) => "the server is silent".to_owned(),
        ureq::Error::HostNotFound => "host not found".to_owned(),
        ureq::Error::Io(error) => error.to_string(),
        ureq::Error::Rustls(error) => {
            format!("TLS: {error}; certificates come from the system's store, or from SSL_CERT_FILE and SSL_CERT_DIR")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_targets_are_joined_to_the_base() {
        let base = parse("https://hub.test:8443/a/b?x=1").unwrap();
        let joined = |target| join(&base, target).map(|uri| uri.to_string());
        assert_eq!(joined("http://other.test/c?u=http://z/").unwrap(), "http://other.test/c?u=http://z/");
        assert_eq!(joined("//other.test/c").unwrap(), "https://other.test/c");
        assert_eq!(joined("/c?u=http://z/#here").unwrap(), "https://hub.test:8443/c?u=http://z/");
        assert_eq!(joined("c").unwrap(), "https://hub.test:8443/a/c");
        for wrong in ["", "#x", "ftp://other.test/c", "https://"] {
            assert!(joined(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let origin = |uri: &str| {
            let uri = parse(uri).unwrap();
            let (scheme, host, port) = origin(&uri);
            (scheme.unwrap().to_owned(), host, port)
        };
        assert_eq!(origin("https://Hub.test/a"), origin("https://hub.test:443/b"));
        assert_ne!(origin("https://hub.test/"), origin("http://hub.test/"));
        assert_ne!(origin("https://hub.test/"), origin("https://hub.test.evil/"));
        assert_ne!(origin("http://hub.test/"), origin("http://hub.test:81/"));
    }
}
