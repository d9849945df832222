//! A client of the daemon's REST API, for programs that may wait: the command line and the driver
//! for container orchestrators.
//!
//! A [`Client`] speaks to one daemon, over its Unix socket or over TCP. Each call is one request;
//! paths are given as their parts, which may have any characters.

#![forbid(unsafe_code)]

use api::{Job, Problem};
use reqwest::blocking::{self, RequestBuilder, Response};
use reqwest::{StatusCode, Url};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::BufReader;
use std::path::Path;
use std::time::Duration;

pub use reqwest::Method;

/// Why a request has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The client cannot be made: an invalid address, token or certificate.
    #[error("no HTTP: {0}")]
    Setup(String),
    /// The daemon does not answer. It may have carried a change out.
    #[error("freestoned does not answer at {place}: {cause}")]
    Silent {
        /// The socket or address.
        place: String,
        /// The innermost reason.
        cause: String,
        /// Whether the time limit of the request has passed.
        is_timeout: bool,
    },
    /// The daemon refuses the request.
    #[error("{}", .0.detail)]
    Refused(Problem),
    /// The answer has an error status without a problem.
    #[error("freestoned at {place} answers {status}")]
    Status {
        /// The socket or address.
        place: String,
        /// The HTTP status.
        status: StatusCode,
    },
    /// The answer is not the one that the API describes.
    #[error("freestoned at {place} sent an invalid answer: {cause}")]
    Invalid {
        /// The socket or address.
        place: String,
        /// The part that is wrong.
        cause: String,
    },
}

/// Result of a request.
pub type Result<T> = std::result::Result<T, Error>;

/// The API of one daemon.
pub struct Client {
    http: blocking::Client,
    base: Url,
    /// The socket or address, for errors.
    place: String,
    token: Option<String>,
}

/// Access to a daemon over TCP.
#[derive(Default)]
pub struct Access {
    /// Token, sent with each request.
    pub token: Option<String>,
    /// Certificates of authorities in PEM that may sign the daemon's certificate, in addition to
    /// those of the system. Needs the feature `tls`.
    pub authorities: Option<Vec<u8>>,
}

/// The requested object, or the job that makes it: their fields tell them apart.
#[derive(serde::Deserialize)]
#[serde(untagged)]
pub enum Begun<T> {
    /// It takes longer.
    Job(Box<Job>),
    /// It is done.
    Done(T),
}

const SOCKET_BASE: &str = "http://freestoned";

impl Client {
    /// The daemon at a Unix socket. `timeout` is the limit of each request; none waits as long as
    /// the daemon works.
    ///
    /// # Errors
    /// When the system refuses what HTTP takes.
    pub fn at_socket(socket: &Path, timeout: Option<Duration>) -> Result<Client> {
        let http = blocking::Client::builder().unix_socket(socket).timeout(timeout);
        Ok(Client {
            http: http.build().map_err(|error| Error::Setup(innermost(&error)))?,
            base: Url::parse(SOCKET_BASE).expect("a valid address"),
            place: socket.display().to_string(),
            token: None,
        })
    }

    /// The daemon at an address, `http://HOST:PORT` or `https://HOST:PORT`. `timeout` is the limit
    /// of each request.
    ///
    /// # Errors
    /// When the address or a certificate is invalid.
    pub fn at_address(address: &str, access: Access, timeout: Option<Duration>) -> Result<Client> {
        let wrong = |cause: &str| Error::Setup(format!("{address}: {cause}"));
        let base = Url::parse(address).map_err(|error| wrong(&error.to_string()))?;
        if !matches!(base.scheme(), "http" | "https") || base.host().is_none() {
            return Err(wrong("want http://HOST:PORT or https://HOST:PORT"));
        }
        let mut http = blocking::Client::builder().timeout(timeout).no_proxy();
        if let Some(pem) = &access.authorities {
            http = trusting(http, pem).map_err(|cause| wrong(&cause))?;
        }
        let http = http.build().map_err(|error| Error::Setup(innermost(&error)))?;
        Ok(Client { http, base, place: address.to_owned(), token: access.token })
    }

    /// Gets the object at a path.
    ///
    /// # Errors
    /// When the daemon does not answer, or there is no such object.
    pub fn get<T: DeserializeOwned>(&self, path: &[&str]) -> Result<T> {
        self.parse(self.send(self.request(Method::GET, self.url(path)))?)
    }

    /// Gets the selected objects of a list.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn list<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&'static str, String)],
    ) -> Result<Vec<T>> {
        self.get_with(path, query)
    }

    /// Gets the object that a query selects.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_with<T: DeserializeOwned>(
        &self,
        path: &[&str],
        query: &[(&'static str, String)],
    ) -> Result<T> {
        let mut url = self.url(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        self.parse(self.send(self.request(Method::GET, url))?)
    }

    /// Gets the object at a path, if it exists.
    ///
    /// # Errors
    /// When the daemon does not answer, or refuses.
    pub fn find<T: DeserializeOwned>(&self, path: &[&str]) -> Result<Option<T>> {
        match self.send(self.request(Method::GET, self.url(path))) {
            Ok(response) => self.parse(response).map(Some),
            Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gets the object at a path within a time limit.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn get_within<T: DeserializeOwned>(&self, path: &[&str], time: Duration) -> Result<T> {
        self.parse(self.send(self.request(Method::GET, self.url(path)).timeout(time))?)
    }

    /// The text at an address that is none of the API's.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn text(&self, path: &str) -> Result<String> {
        let mut url = self.base.clone();
        url.set_path(path);
        self.send(self.request(Method::GET, url))?.text().map_err(|error| self.silent(&error))
    }

    /// A long answer, as it comes.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub fn follow(&self, path: &[&str]) -> Result<BufReader<Response>> {
        Ok(BufReader::new(self.send(self.request(Method::GET, self.url(path)))?))
    }

    /// Has something changed. A change that takes long is answered with its job.
    ///
    /// # Errors
    /// When the daemon does not answer, or refuses.
    pub fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: &impl Serialize,
    ) -> Result<T> {
        let request = self.request(method, self.url(path)).json(body).header("prefer", "respond-async");
        self.parse(self.send(request)?)
    }

    /// Has something deleted.
    ///
    /// # Errors
    /// As [`Client::change`].
    pub fn delete(&self, path: &[&str], query: &[(&str, &str)]) -> Result<()> {
        let mut url = self.url(path);
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        self.send(self.request(Method::DELETE, url)).map(drop)
    }

    /// The address of an object, whatever characters the parts of its path have.
    pub fn url(&self, path: &[&str]) -> Url {
        let mut url = self.base.clone();
        let mut segments = url.path_segments_mut().expect("it has a host");
        segments.pop_if_empty().push("v1").extend(path);
        drop(segments);
        url
    }

    fn request(&self, method: Method, url: Url) -> RequestBuilder {
        let request = self.http.request(method, url);
        match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    fn send(&self, request: RequestBuilder) -> Result<Response> {
        let response = request.send().map_err(|error| self.silent(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        match response.json::<Problem>() {
            Ok(problem) => Err(Error::Refused(problem)),
            Err(_) => Err(Error::Status { place: self.place.clone(), status }),
        }
    }

    fn silent(&self, error: &reqwest::Error) -> Error {
        Error::Silent { place: self.place.clone(), cause: innermost(error), is_timeout: error.is_timeout() }
    }

    fn parse<T: DeserializeOwned>(&self, response: Response) -> Result<T> {
        let text = response.text().map_err(|error| self.silent(&error))?;
        serde_json::from_str(&text)
            .map_err(|error| Error::Invalid { place: self.place.clone(), cause: error.to_string() })
    }
}

impl Error {
    /// The HTTP status of an answer that refuses.
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Error::Refused(problem) => StatusCode::from_u16(problem.status).ok(),
            Error::Status { status, .. } => Some(*status),
            Error::Setup(_) | Error::Silent { .. } | Error::Invalid { .. } => None,
        }
    }
}

#[cfg(feature = "tls")]
fn trusting(
    http: blocking::ClientBuilder,
    pem: &[u8],
) -> std::result::Result<blocking::ClientBuilder, String> {
    let authorities = reqwest::Certificate::from_pem_bundle(pem).map_err(|error| innermost(&error))?;
    Ok(authorities.into_iter().fold(http, blocking::ClientBuilder::add_root_certificate))
}

#[cfg(not(feature = "tls"))]
fn trusting(_: blocking::ClientBuilder, _: &[u8]) -> std::result::Result<blocking::ClientBuilder, String> {
    Err("TLS is not compiled in".into())
}

/// The reason at the end of the chain of causes.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_path_may_have_any_characters() {
        let client = Client::at_address("http://127.0.0.1:1", Access::default(), None).unwrap();
        let url = client.url(&["volumes", "../x?y#z"]);
        assert_eq!(url.as_str(), "http://127.0.0.1:1/v1/volumes/..%2Fx%3Fy%23z");
    }

    #[test]
    fn an_address_without_a_host_or_with_another_scheme_is_refused() {
        for address in ["freestoned", "ftp://host", "https:///", "unix:/run/x"] {
            let error = Client::at_address(address, Access::default(), None).map(drop).unwrap_err();
            assert!(error.to_string().contains(address), "{error}");
        }
    }

    #[test]
    fn a_daemon_that_is_absent_is_named() {
        let client = Client::at_socket(Path::new("/nonexistent/d.sock"), None).unwrap();
        let error = client.get::<serde_json::Value>(&["system"]).unwrap_err();
        assert!(matches!(&error, Error::Silent { place, .. } if place == "/nonexistent/d.sock"), "{error}");
    }
}
