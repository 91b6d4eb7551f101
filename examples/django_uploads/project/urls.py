"""The page, what the runner asks for, and the admin."""

from django.contrib import admin
from django.urls import path
from uploads import views

urlpatterns = [
    path("", views.index, name="index"),
    path("uploads/<int:pk>/content", views.content, name="content"),
    path("uploads/<int:pk>/report", views.report, name="report"),
    path("admin/", admin.site.urls),
]
