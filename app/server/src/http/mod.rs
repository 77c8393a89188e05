//! The HTTP surface: paths, headers, who may ask. Behaviour: `docs/server.md`.

pub(crate) mod answer;
mod auth;
pub(crate) mod error;
mod generate;
mod health;
mod models;
mod openapi;
mod read;
pub(crate) mod request;

pub use auth::ApiKey;
pub use error::{ErrorBody, ErrorDetail};
pub use openapi::document;
pub use request::DEFAULT_MAX_CHARS;

use crate::admission::{Admission, RateLimit};
use crate::fleet::Fleet;
use crate::metrics::{Metrics, RequestLabels};
use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::routing::{get, post};
use error::ApiError;
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the handlers share.
pub(crate) struct Service {
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) rate_limit: RateLimit,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) api_key: Option<ApiKey>,
    pub(crate) origins: Vec<String>,
    pub(crate) max_body_bytes: usize,
    pub(crate) max_chars: usize,
    pub(crate) body_limit: Duration,
    pub(crate) request_limit: Duration,
    pub(crate) heartbeat: Duration,
}

pub(crate) type Shared = Arc<Service>;

/// Number of a request, in its answer and at the start of its line in the log.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) String);

/// Paths and the names they are counted under.
const ENDPOINTS: [(&str, &str); 12] = [
    ("/", "/"),
    ("/openapi.json", "/openapi.json"),
    ("/v1/openapi.json", "/openapi.json"),
    ("/health", "/health"),
    ("/health/live", "/health"),
    ("/v1/health", "/ready"),
    ("/ready", "/ready"),
    ("/health/ready", "/ready"),
    ("/metrics", "/metrics"),
    ("/v1/models", "/v1/models"),
    ("/v1/chat/completions", "/v1/chat/completions"),
    ("/v1/completions", "/v1/completions"),
];

pub(crate) fn router(service: Shared) -> Router {
    let open = Router::new()
        .route("/", get(health::root))
        .route("/openapi.json", get(openapi::serve))
        .route("/v1/openapi.json", get(openapi::serve))
        .route("/health", get(health::live))
        .route("/health/live", get(health::live))
        .route("/ready", get(health::ready))
        .route("/health/ready", get(health::ready))
        .route("/v1/health", get(health::ready));
    let guarded = Router::new()
        .route("/metrics", get(health::metrics))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::text))
        .route_layer(from_fn_with_state(Arc::clone(&service), auth::check));
    open.merge(guarded)
        .fallback(|| async { ApiError::not_found().into_response() })
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed().into_response() })
        .layer(from_fn_with_state(Arc::clone(&service), around))
        .with_state(service)
}

/// A path without the slash at its end; queries are ignored.
pub(crate) fn normalized(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let trimmed = path.trim_end_matches('/');
    if trimmed.len() == path.len() || path.len() <= 1 {
        return None;
    }
    Uri::builder().path_and_query(if trimmed.is_empty() { "/" } else { trimmed }).build().ok()
}

/// What every answer has: a number, headers, a count, a line in the log.
async fn around(State(service): State<Shared>, mut request: Request, next: Next) -> Response<Body> {
    let started = Instant::now();
    // Numbers of requests are for finding them in the log; no secret hangs on them.
    let id = format!("req-{}", hex(&random::<16>().unwrap_or_default()));
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let client = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = match method {
        Method::OPTIONS => preflight(request.headers()),
        _ => next.run(request).await,
    };
    let endpoint = endpoint(&path);
    let status = response.status();
    service.metrics.requests.get_or_create(&RequestLabels { endpoint, status: status.as_u16() }).inc();
    let headers = response.headers_mut();
    common_headers(headers, &id);
    if endpoint != "/metrics" {
        allow_origin(headers, origin.as_ref(), &service.origins);
    }
    let client = client.map_or_else(|| "-".to_owned(), |client| client.ip().to_string());
    let ms = started.elapsed().as_millis();
    tracing::info!(target: "npuhal_server::access", "{id} {client} {method} {endpoint} {} {ms} ms", status.as_u16());
    response
}

/// The name a path is counted under: a bounded set, whatever clients send.
fn endpoint(path: &str) -> &'static str {
    match ENDPOINTS.iter().find(|(known, _)| *known == path) {
        Some((_, name)) => name,
        None if path.starts_with("/v1/models/") => "/v1/models/*",
        None => "/unknown",
    }
}

fn common_headers(headers: &mut HeaderMap, id: &str) {
    let fixed = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (header::ACCESS_CONTROL_EXPOSE_HEADERS, "X-Request-ID, Retry-After"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(value) = HeaderValue::from_str(id) {
        headers.insert(HeaderName::from_static("x-request-id"), value);
    }
}

fn allow_origin(headers: &mut HeaderMap, origin: Option<&HeaderValue>, allowed: &[String]) {
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    if let Some(origin) = origin
        && allowed.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes())
    {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    }
}

/// The answer to a browser that asks what it may send. It counts for the origins that are allowed, by the header they get besides;
/// those may send any headers: the ones of SDKs are many, and none but the key means anything here.
fn preflight(request: &HeaderMap) -> Response<Body> {
    let usual = HeaderValue::from_static("Authorization, Content-Type");
    let asked = request.get(header::ACCESS_CONTROL_REQUEST_HEADERS).filter(|asked| is_header_list(asked)).cloned();
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(usual));
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    headers.append(header::VARY, HeaderValue::from_static("Access-Control-Request-Headers"));
    response
}

/// Names of headers, separated by commas.
fn is_header_list(value: &HeaderValue) -> bool {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    value.len() <= 2048 && value.to_str().is_ok_and(|list| list.split(',').all(|name| is_name(name.trim())))
}

/// A JSON answer.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    // Values of this crate are plain data; what cannot be written is an error of the server.
    let (status, text) = match serde_json::to_vec(value) {
        Ok(text) => (status, text),
        Err(error) => {
            tracing::error!(%error, "an answer could not be written");
            (StatusCode::INTERNAL_SERVER_ERROR, Vec::new())
        }
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Bytes from the system's generator.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], getrandom::Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_lose_their_last_slash_and_their_query() {
        let normal = |text: &'static str| normalized(&Uri::from_static(text)).map(|uri| uri.to_string());
        assert_eq!(normal("/v1/models/"), Some("/v1/models".to_owned()));
        assert_eq!(normal("/v1/models"), None);
        assert_eq!(normal("/"), None);
        assert_eq!(normal("//"), Some("/".to_owned()));
    }

    #[test]
    fn only_lists_of_names_are_echoed_to_browsers() {
        let echoed = |text: &str| {
            let mut request = HeaderMap::new();
            request.insert(header::ACCESS_CONTROL_REQUEST_HEADERS, HeaderValue::from_str(text).unwrap());
            preflight(&request).headers()[header::ACCESS_CONTROL_ALLOW_HEADERS].to_str().unwrap().to_owned()
        };
        for list in ["authorization", "authorization,x-stainless-helper-method", "a, b-c ,d_e"] {
            assert_eq!(echoed(list), list);
        }
        for other in ["", "a,,b", "a b", "a;b", "<x>", &"a,".repeat(2000)] {
            assert_eq!(echoed(other), "Authorization, Content-Type");
        }
    }

    #[test]
    fn paths_are_counted_under_a_bounded_set_of_names() {
        assert_eq!(endpoint("/health/live"), "/health");
        assert_eq!(endpoint("/v1/models/some/model"), "/v1/models/*");
        assert_eq!(endpoint("/v1/../etc/passwd"), "/unknown");
    }
}
