//! A client of servers with the OpenAI interface.
//!
//! An address is `http` or `https` with a host and without user information. With a key, plain `http` is taken to this
//! machine only. No redirect is followed, so that a key goes nowhere but to the address that was given. This machine is
//! never asked through a proxy.

use crate::environment::Setting;
use crate::error::CliError;
use crate::sse::EventReader;
use serde_json::Value;
use std::fmt;
use std::io::{self, BufReader};
use std::net::IpAddr;
use std::time::Duration;
use thiserror::Error;
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, BodyReader};

/// Why a server did not answer as wanted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum ApiError {
    #[error("'{url}' is not the address of a server: {reason}; wanted http://HOST:PORT or https://HOST")]
    BadUrl { url: String, reason: String },
    #[error(
        "{url} is not encrypted, and the API key would be sent for all to read; use https, or a server on this machine"
    )]
    KeyInTheOpen { url: String },
    #[error("the API key has characters that cannot be sent")]
    BadKey,
    #[error("{url}: {reason}; is the server running?")]
    Unreachable { url: String, reason: String },
    #[error(
        "{url}: {reason}; if the certificate is your own, set SSL_CERT_FILE to a PEM file with it, or with the authority that \
         signed it (a certificate marked as an authority cannot be a server's own)"
    )]
    Untrusted { url: String, reason: String },
    #[error("{url}: answers with a redirect ({status}), which is not followed; give the address it leads to")]
    Redirect { url: String, status: u16 },
    #[error("{url}: status {status}: {message}{}", advice(*status, *retry_after))]
    Status { url: String, status: u16, message: String, retry_after: Option<u64> },
    #[error("{url}: the answer is not what was wanted: {reason}")]
    BadAnswer { url: String, reason: String },
    #[error("{url}: the stream broke off: {reason}; what came is not the whole answer")]
    BrokenStream { url: String, reason: String },
    #[error("API stream failed: {message}")]
    StreamFailed { message: String },
}

/// The server that is to be asked instead of a model here: the `given` one, or that of the environment. Who says where a model
/// runs and how (`is_here`) means this machine.
///
/// # Errors
/// A usage error where both are said.
pub(crate) fn server(given: Option<&str>, is_here: bool) -> Result<Option<Setting>, CliError> {
    match (given, is_here) {
        (Some(_), true) => {
            let message = "--api-url: the model runs on the server; how and where is said there, not here";
            Err(CliError::Usage(message.to_owned()))
        }
        (None, true) => Ok(None),
        (given, false) => Setting::of("--api-url", given, "NPUHAL_API_URL"),
    }
}

/// A client of the server at `url`, with the `given` key or that of the environment.
///
/// # Errors
/// A usage error that names the flag or the variable at fault.
pub(crate) fn connect(url: &Setting, given: Option<&str>, patience: Duration) -> Result<Client, CliError> {
    let key = Setting::of("--api-key", given, "NPUHAL_API_KEY")?;
    let client = Client::new(&url.value, key.as_ref().map(|key| key.value.clone()), patience);
    client.map_err(|error| {
        let of_key = key.filter(|_| !matches!(error, ApiError::BadUrl { .. })).map(|key| key.source);
        CliError::Usage(format!("{}: {error}", of_key.unwrap_or(url.source)))
    })
}

/// A server.
pub(crate) struct Client {
    base: String,
    key: Option<String>,
    agent: Agent,
}

impl fmt::Debug for Client {
    /// The key is not printed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("base", &self.base).field("has_key", &self.key.is_some()).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the server at `url`, which may end in `/v1`; nothing is sent yet. `patience` is how long an answer may take.
    ///
    /// # Errors
    /// [`ApiError::BadUrl`], [`ApiError::KeyInTheOpen`], [`ApiError::BadKey`].
    pub(crate) fn new(url: &str, key: Option<String>, patience: Duration) -> Result<Self, ApiError> {
        let bad = |reason: &str| ApiError::BadUrl { url: without_user(url), reason: reason.to_owned() };
        let uri: Uri = url.trim().parse().map_err(|_| bad("it cannot be read"))?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| bad("it has no host"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(bad("it does not begin with http:// or https://"));
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(bad("it holds a user name; give a key with --api-key instead"));
        }
        if uri.query().is_some() {
            return Err(bad("it has a query"));
        }
        let is_local = is_loopback(host);
        if key.is_some() && uri.scheme_str() == Some("http") && !is_local {
            return Err(ApiError::KeyInTheOpen { url: url.to_owned() });
        }
        if key.as_ref().is_some_and(|key| key.is_empty() || !key.bytes().all(|byte| (0x21..=0x7e).contains(&byte))) {
            return Err(ApiError::BadKey);
        }
        let mut config = Agent::config_builder()
            .tls_config(TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build())
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("npuhal/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(patience))
            .timeout_per_read(Some(patience));
        if is_local {
            config = config.proxy(None);
        }
        let base = url.trim().trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base).trim_end_matches('/').to_owned();
        Ok(Self { base, key, agent: Agent::new_with_config(config.build()) })
    }

    /// The address of the server.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// The ids of the server's models.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) fn models(&self) -> Result<Vec<String>, ApiError> {
        let path = "/v1/models";
        let answer = self.read(path, self.request(path))?;
        let models = answer["data"].as_array().ok_or_else(|| self.bad_answer(path, "it has no array 'data'"))?;
        Ok(models.iter().filter_map(|model| model["id"].as_str().map(str::to_owned)).collect())
    }

    /// The model that is listed first.
    ///
    /// # Errors
    /// [`ApiError`], also where there is none.
    pub(crate) fn first_model(&self) -> Result<String, ApiError> {
        let none = || self.bad_answer("/v1/models", "the server has no models");
        self.models()?.into_iter().next().ok_or_else(none)
    }

    /// Sends `body` and returns the JSON answer.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        self.read(path, self.send(path, body))
    }

    /// Sends `body`, which asks for a stream, and returns its events.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) fn stream(&self, path: &str, body: &Value) -> Result<EventStream, ApiError> {
        let body = self.accepted(path, self.send(path, body))?;
        if body.mime_type() != Some("text/event-stream") {
            let found = body.mime_type().unwrap_or("no media type").to_owned();
            return Err(self.bad_answer(path, format!("wanted text/event-stream, found {found}")));
        }
        let events = EventReader::new(BufReader::new(body.into_reader()));
        Ok(EventStream { url: self.url(path), events, is_over: false })
    }

    /// The body of an answer that is text, whole.
    ///
    /// # Errors
    /// [`ApiError`].
    pub(crate) fn text(&self, path: &str) -> Result<String, ApiError> {
        let body = self.accepted(path, self.request(path))?;
        let text = body.into_with_config().limit(ANSWER_LIMIT_BYTES).read_to_string();
        text.map_err(|error| self.bad_answer(path, error.to_string()))
    }

    /// An answer that came, and is not what was wanted.
    pub(crate) fn bad_answer(&self, path: &str, reason: impl Into<String>) -> ApiError {
        ApiError::BadAnswer { url: self.url(path), reason: reason.into() }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    fn authorization(&self) -> Option<String> {
        self.key.as_ref().map(|key| format!("Bearer {key}"))
    }

    fn request(&self, path: &str) -> Result<Response<Body>, ureq::Error> {
        let request = self.agent.get(self.url(path));
        match self.authorization() {
            Some(value) => request.header(header::AUTHORIZATION, value).call(),
            None => request.call(),
        }
    }

    fn send(&self, path: &str, body: &Value) -> Result<Response<Body>, ureq::Error> {
        let request = self.agent.post(self.url(path)).header(header::CONTENT_TYPE, "application/json");
        let request = match self.authorization() {
            Some(value) => request.header(header::AUTHORIZATION, value),
            None => request,
        };
        request.send(body.to_string().as_bytes())
    }

    fn read(&self, path: &str, sent: Result<Response<Body>, ureq::Error>) -> Result<Value, ApiError> {
        let body = self.accepted(path, sent)?;
        let body = body.into_with_config().limit(ANSWER_LIMIT_BYTES).read_to_vec();
        let body = body.map_err(|error| self.bad_answer(path, reason(&error)))?;
        serde_json::from_slice(&body).map_err(|error| self.bad_answer(path, format!("it is no JSON: {error}")))
    }

    /// The body of an answer with status 200.
    fn accepted(&self, path: &str, sent: Result<Response<Body>, ureq::Error>) -> Result<Body, ApiError> {
        let url = self.url(path);
        let response = sent.map_err(|error| match (url.clone(), reason(&error)) {
            (url, reason) if reason.contains("peer certificate") => ApiError::Untrusted { url, reason },
            (url, reason) => ApiError::Unreachable { url, reason },
        })?;
        let status = response.status();
        if status.is_redirection() {
            return Err(ApiError::Redirect { url, status: status.as_u16() });
        }
        if status == StatusCode::OK {
            return Ok(response.into_body());
        }
        let retry_after =
            response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let body = response.into_body().into_with_config().limit(ANSWER_LIMIT_BYTES).read_to_vec();
        let json = body.ok().and_then(|body| serde_json::from_slice::<Value>(&body).ok());
        let said = json.and_then(|json| json["error"]["message"].as_str().map(str::to_owned));
        let message = said.unwrap_or_else(|| status.canonical_reason().unwrap_or("no message").to_owned());
        Err(ApiError::Status { url, status: status.as_u16(), message, retry_after })
    }
}

/// The events of a streamed answer. After the last one comes `[DONE]`; a stream that ends without it is an error.
pub(crate) struct EventStream {
    url: String,
    events: EventReader<BufReader<BodyReader<'static>>>,
    is_over: bool,
}

impl EventStream {
    fn event(&mut self) -> Result<Option<Value>, ApiError> {
        let broken = |reason| ApiError::BrokenStream { url: self.url.clone(), reason };
        let event = self.events.read().map_err(|error| broken(reason_of_io(&error)))?;
        let event = event.ok_or_else(|| broken("it ended without [DONE]".to_owned()))?;
        if event == "[DONE]" {
            return Ok(None);
        }
        let event: Value =
            serde_json::from_str(&event).map_err(|error| broken(format!("an event is no JSON: {error}")))?;
        match &event["error"] {
            Value::Null => Ok(Some(event)),
            error => {
                let message = error["message"].as_str().or(error.as_str()).unwrap_or("no message").to_owned();
                Err(ApiError::StreamFailed { message })
            }
        }
    }
}

impl Iterator for EventStream {
    type Item = Result<Value, ApiError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let event = self.event().transpose();
        self.is_over = !matches!(event, Some(Ok(_)));
        event
    }
}

/// What to do about an answer with this status.
fn advice(status: u16, retry_after: Option<u64>) -> String {
    match (status, retry_after) {
        (401 | 403, _) => "; give the server's key with --api-key or NPUHAL_API_KEY".to_owned(),
        (429 | 503, Some(seconds)) => format!("; try again in {seconds} s"),
        (429 | 503, None) => "; try again later".to_owned(),
        _ => String::new(),
    }
}

/// Why there is no answer, without numbers of the system.
fn reason(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => reason_of_io(error),
        ureq::Error::HostNotFound => "there is no host of this name".to_owned(),
        ureq::Error::Timeout(_) => "no answer in time".to_owned(),
        other => other.to_string(),
    }
}

fn reason_of_io(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>());
    if let Some(inner) = inner {
        return reason(inner);
    }
    match error.kind() {
        io::ErrorKind::ConnectionRefused => "the connection was refused".to_owned(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe => {
            "the connection was closed".to_owned()
        }
        io::ErrorKind::UnexpectedEof => "the connection was closed in the middle".to_owned(),
        io::ErrorKind::TimedOut => "no answer in time".to_owned(),
        _ => error.to_string(),
    }
}

/// An address without what may be a password.
fn without_user(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let end = rest.find('/').unwrap_or(rest.len());
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}://…{}", &rest[at..]),
        None => url.to_owned(),
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ANSWER_LIMIT_BYTES: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_go_to_encrypted_or_local_servers_only() {
        let client = |url: &str, key: Option<&str>| Client::new(url, key.map(str::to_owned), CONNECT_TIMEOUT);
        for url in ["http://127.0.0.1:8000", "http://localhost:8000/v1/", "http://[::1]:80", "https://host.test"] {
            assert!(client(url, Some("secret")).is_ok(), "{url}");
        }
        assert_eq!(
            client("http://localhost:8000/v1/", None).unwrap().url("/v1/models"),
            "http://localhost:8000/v1/models"
        );
        assert_eq!(client("https://host.test/api", None).unwrap().base(), "https://host.test/api");
        for url in ["http://host.test", "http://10.0.0.1:8000", "http://127.0.0.1.host.test"] {
            assert!(matches!(client(url, Some("secret")), Err(ApiError::KeyInTheOpen { .. })), "{url}");
            assert!(client(url, None).is_ok(), "{url}");
        }
        for url in ["", "host", "ftp://host.test", "http://", "https://user:pw@host.test", "http://h.test/?a=b", "/x"] {
            let error = client(url, None).unwrap_err().to_string();
            assert!(error.contains("is not the address of a server") && !error.contains("pw"), "{error}");
        }
        for key in ["", "a b", "a\r\nb", "ü"] {
            assert!(matches!(client("https://host.test", Some(key)), Err(ApiError::BadKey)), "{key:?}");
        }
        assert!(!format!("{:?}", client("https://host.test", Some("secret")).unwrap()).contains("secret"));
    }
}
